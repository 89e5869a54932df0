"""For every test: one thread, and memory that the package did not initialise holds NaN instead of lucky zeros."""

import pytest
import torch
from poison import FACTORIES, poisoned

torch.set_num_threads(1)  # forked ranks share the machine, and sums keep one order
# A process's first backward decides for good whether autograd needs threads, with which none can be forked. Behind a
# test that makes tensors of a device that is not there it would.
torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch):
    """torch.empty and its relatives; ranks that a test forks inherit it."""
    for owner, names in FACTORIES:
        for name in names:
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
