"""Megatron-Core: layers, specs, models, schedule runtime, optimizer, checkpoints and the CPU runtime."""

from longstraw_megatron.mcore.quiet import quiet_megatron_import

quiet_megatron_import()
