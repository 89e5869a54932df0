"""GRPO on million-token prompts with Megatron-Core: the exact gradient, at the memory of one segment."""

__version__ = "0.1.0"
