"""The one exception that a user is meant to read."""


class RefusedError(ValueError):
    """Bad input, refused before any weight is made.

    The message is one sentence: what, got, wanted, what to do. The doors (`train.py`, `cli.py`) print it on one
    rank's stderr and leave with exit code 2.
    """
