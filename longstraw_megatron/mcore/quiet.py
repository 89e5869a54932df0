"""The known warnings of importing Megatron-Core, kept quiet in this one place.

Every one of them tells that an optional package is missing and what is used in its place, or is a slip in a docstring
of Megatron's. Other warnings, and anything that is logged or warned after the import, come through.
"""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator

# (message as a regular expression from its start, category); who says it, in megatron/core of 0.19.2
KNOWN_WARNINGS = (
    ("Transformer Engine and Apex are not installed", UserWarning),  # optimizer/__init__.py:25, clip_grads.py:32 ...
    ("Apex is not installed", UserWarning),  # models/backends.py:34
    ("absl.logging is not installed", UserWarning),  # hyper_comm_grid.py:20
    ("The following imports from `dynamic_context.py`", DeprecationWarning),  # inference/contexts/__init__.py:9
    (r"(\"\\-\" is an )?invalid escape sequence", SyntaxWarning),  # inference/contexts/kv_block_allocator.py:426
)
KNOWN_BUILD_WARNINGS = (
    ("full scope is deprecated", UserWarning),  # transformer_config.py:2415, from its own default
    (
        "MimoModelConfig is experimental",
        UserWarning,
    ),  # models/mimo/config/base_configs.py:12, imported by the optimizer
    ("When using sequence parallelism it is recommended to set", UserWarning),  # layers.py:848, on a CPU there is none
)
# dist_checkpointing/serialization.py:229, strategies/torch.py: how Megatron calls torch
KNOWN_LOAD_WARNINGS = (
    ("torch.distributed is disabled, unavailable or uninitialized", UserWarning),
    ("The argument order of load has been changed", UserWarning),
    ("Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning),
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
    known = ("No CUDA runtime is found", "GPTModel IS DEPRECATED")
    return not record.getMessage().startswith(known)


@contextlib.contextmanager
def quiet_megatron_build() -> Iterator[None]:
    """Building a model or an optimizer without the warnings that Megatron is known to give on the way.

    GPTModel's is about its successor, HybridModel, whose layer numbers do not fit IndexShare in 0.19.
    """
    gpt_model = logging.getLogger("megatron.core.models.gpt.gpt_model")
    gpt_model.addFilter(_is_news)
    try:
        with warnings.catch_warnings():
            for message, category in KNOWN_BUILD_WARNINGS:
                warnings.filterwarnings("ignore", message=message, category=category)
            yield
    finally:
        gpt_model.removeFilter(_is_news)


@contextlib.contextmanager
def quiet_megatron_load() -> Iterator[None]:
    """Loading a distributed checkpoint without the warnings of how Megatron calls torch."""
    with warnings.catch_warnings():
        for message, category in KNOWN_LOAD_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


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
