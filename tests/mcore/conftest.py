"""Megatron is imported once, here; the ranks of a test are forked from this process."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # upstream's own, at import
    import longstraw_megatron.mcore  # noqa: F401
