"""`longstraw plan`: does a model at a prompt length fit some GPUs, in which layout, in what time. No GPU is touched."""

from longstraw_megatron.planner.door import main, num_gpus_of, resolve_hardware

__all__ = ["main", "num_gpus_of", "resolve_hardware"]
