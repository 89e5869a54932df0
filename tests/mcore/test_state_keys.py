"""The keys of prefix state and of blocks reach the learner."""

import dataclasses
from types import SimpleNamespace

import torch

from longstraw_megatron.compose import load_config
from longstraw_megatron.config import resolve_auto
from longstraw_megatron.mcore.session import learner_options
from longstraw_megatron.ops.staging import HostStaging
from longstraw_megatron.state import OnDevice

CONTEXT = SimpleNamespace(row_multiple=1, device=torch.device("cpu"))


def _options(*words):
    return learner_options(resolve_auto(load_config(list(words)), cuda_available=False), CONTEXT)


def test_defaults():
    options = _options()
    assert type(options.state.residence) is OnDevice
    assert (options.state.grad_dtype, options.state.grad_rounding) == (None, "nearest")
    assert (options.cut.response_block, options.reuse_steps, options.reuse_check_every) == (None, 0, 1)


def test_every_key_is_heard():
    words = ["response_block=7", "state.location=host", "state.grad_dtype=bf16", "state.grad_rounding=stochastic"]
    options = _options(*words, "gradient=detached", "state.reuse_steps=3", "state.reuse_check_every=null")
    assert options.cut.response_block == 7
    assert type(options.state.residence) is HostStaging
    assert (options.state.grad_dtype, options.state.grad_rounding) == (torch.bfloat16, "stochastic")
    assert (options.reuse_steps, options.reuse_check_every, options.state.exact) == (3, None, False)
    assert dataclasses.replace(options.state, exact=False) == options.state
