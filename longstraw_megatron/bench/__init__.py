"""`longstraw bench`: dense training against `gradient=exact` and `gradient=detached`, time and peak memory."""

from longstraw_megatron.bench.door import main

__all__ = ["main"]
