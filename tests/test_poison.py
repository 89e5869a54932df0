"""The poison that conftest.py lays works: on memory that the package asks for, and on that alone."""

import torch
from poison import poisoned

import longstraw_megatron


def run_as(name: str, expression: str):
    """The value of `expression`, evaluated by a caller in module `name`."""
    return eval(expression, {"__name__": name, "torch": torch})


def test_memory_of_the_package_ispoisoned():
    name = f"{longstraw_megatron.__name__}.state.pages"
    for expression in ("torch.empty(3)", "torch.empty_like(torch.zeros(3))", "torch.zeros(3).new_empty(3)"):
        assert run_as(name, expression).isnan().all(), expression
    assert (run_as(name, "torch.empty(3, dtype=torch.int32)") == torch.iinfo(torch.int32).max).all()


def test_memory_of_others_is_left_alone():
    wrapped = {"factory": poisoned(lambda: torch.ones(3))}
    for name, is_poisoned in (("megatron.core", False), ("tests", False), (f"{longstraw_megatron.__name__}.ops", True)):
        tensor = eval("factory()", {"__name__": name, **wrapped})
        assert bool(tensor.isnan().all()) is is_poisoned, name
    assert run_as(longstraw_megatron.__name__, "torch.empty(3, device='meta')").is_meta


def test_a_device_context_still_holds():
    with torch.device("meta"):
        assert torch.empty(3).is_meta and torch.nn.Linear(2, 3).weight.is_meta
        assert run_as(longstraw_megatron.__name__, "torch.empty(3)").is_meta
