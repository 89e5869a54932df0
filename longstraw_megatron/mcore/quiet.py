"""The known warnings of importing Megatron-Core, kept quiet in this one place.

Every one of them tells that an optional package is missing and what is used in its place, or is a slip in a docstring
of Megatron's. Other warnings, and anything that is logged or warned after the import, come through.
"""

import importlib
import logging
import warnings

# (message as a regular expression from its start, category); who says it, in megatron/core of 0.19.2
KNOWN_WARNINGS = (
    ("Transformer Engine and Apex are not installed", UserWarning),  # optimizer/__init__.py:25, clip_grads.py:32 ...
    ("Apex is not installed", UserWarning),  # models/backends.py:34
    ("absl.logging is not installed", UserWarning),  # hyper_comm_grid.py:20
    ("The following imports from `dynamic_context.py`", DeprecationWarning),  # inference/contexts/__init__.py:9
    (r"(\"\\-\" is an )?invalid escape sequence", SyntaxWarning),  # inference/contexts/kv_block_allocator.py:426
)
MODULES = (
    "megatron.core",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)


def _is_news(record: logging.LogRecord) -> bool:
    return "No CUDA runtime is found" not in record.getMessage()


def quiet_megatron_import() -> None:
    """Import the parts of Megatron-Core that are used here, without the warnings that they are known to give."""
    cpp_extension = logging.getLogger("torch.utils.cpp_extension")  # says so on a machine with a toolkit and no GPU
    cpp_extension.addFilter(_is_news)
    try:
        with warnings.catch_warnings():
            for message, category in KNOWN_WARNINGS:
                warnings.filterwarnings("ignore", message=message, category=category)
            for module in MODULES:
                importlib.import_module(module)
    finally:
        cpp_extension.removeFilter(_is_news)
