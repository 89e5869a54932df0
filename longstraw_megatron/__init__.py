"""GRPO on million-token prompts with Megatron-Core: the exact gradient, at the memory of one segment."""

import importlib

__version__ = "0.1.0"

# Megatron takes seconds to import: what needs it is imported when it is asked for.
_HOMES = {
    "PromptMicrobatch": "longstraw_megatron.mcore.prompt_batch",
    "PromptOptions": "longstraw_megatron.mcore.prompt_checks",
    "get_forward_backward_func": "longstraw_megatron.mcore.forward_backward",
    "prepare_chunk": "longstraw_megatron.mcore.model",
    "segment_block_spec": "longstraw_megatron.mcore.specs",
}

__all__ = [
    "PromptMicrobatch",
    "PromptOptions",
    "__version__",
    "get_forward_backward_func",
    "prepare_chunk",
    "segment_block_spec",
]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
