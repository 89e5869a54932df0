"""The defaults and the named choices of every key, composed by Hydra into `longstraw_megatron.config.Config`."""
