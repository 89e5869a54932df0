"""Tensor factories whose memory is NaN where the package itself is the caller, instead of what happened to be there."""

import functools
import sys

import torch
from torch.utils._device import _device_constructors

import longstraw_megatron

# `with torch.device(...)` knows factories by identity, from a set that is made once: it must hold the originals.
_device_constructors()

FACTORIES = ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",)))


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    """NaN, or the largest integer; booleans have no odd value."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def poisoned(factory):
    """`factory`, but what it returns to a caller in the package is filled."""

    @functools.wraps(factory)
    def wrapper(*args, **kwargs):
        tensor = factory(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] != longstraw_megatron.__name__ or tensor.is_meta:
            return tensor
        with torch.no_grad():
            return _fill(tensor)

    return wrapper
