"""For every test: one thread, and memory that the package did not initialise holds NaN instead of lucky zeros."""

import sys

import pytest
import torch

import longstraw_megatron

torch.set_num_threads(1)  # forked ranks share the machine, and sums keep one order


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def _poisoned(factory):
    """`factory` whose tensors are poisoned where the package itself is the caller."""

    def wrapper(*args, **kwargs):
        tensor = factory(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] != longstraw_megatron.__name__ or tensor.is_meta:
            return tensor
        with torch.no_grad():
            return _poison(tensor)

    return wrapper


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch):
    """torch.empty and its relatives; ranks that a test forks inherit it."""
    for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",))):
        for name in names:
            monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
