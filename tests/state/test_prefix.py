"""Boundary states and the prefix state that hands out a layer's tables."""

import pytest
import torch

from longstraw_megatron.ops.staging import HostStaging
from longstraw_megatron.state import BoundaryStates, OnDevice, PrefixState, StateOptions


def state_of(value):
    return torch.full((3, 2), float(value)), torch.full((2, 2, 2), 10.0 * value)


def firsts(tensors):
    return [tensor.flatten()[0].item() for tensor in tensors]


def test_all_boundaries_are_kept_for_the_walk():
    states = BoundaryStates(keep_all=True)
    for boundary in (1, 2, 3):
        states.put(boundary, *state_of(boundary))
    assert [firsts(states.get(boundary)) for boundary in (1, 2, 3)] == [[1, 10], [2, 20], [3, 30]]
    assert states.value_bytes() == 3 * 4 * (6 + 8)
    states.truncate(2)
    assert states.value_bytes() == 2 * 4 * (6 + 8)
    with pytest.raises(KeyError):
        states.get(3)


def test_a_detached_prompt_keeps_the_last_boundary():
    states = BoundaryStates(keep_all=False)
    for boundary in (1, 2, 3):
        states.put(boundary, *state_of(boundary))
    assert states.value_bytes() == 4 * (6 + 8)
    assert firsts(states.get(3)) == [3, 30]


def test_gradients_add_up_at_their_boundary():
    states = BoundaryStates(keep_all=True)
    for boundary in (1, 2):
        states.put(boundary, *(x.requires_grad_() for x in state_of(boundary)))
    assert not states.get(1)[0].requires_grad
    states.add_grad(2, *state_of(1))
    states.add_grad(2, *state_of(4))
    assert firsts(states.grad(2)) == [5, 50]
    assert states.grad(1) is None
    states.truncate(1)
    assert states.grad(2) is None and states.grad_bytes() == 0


def test_a_branch_reads_its_parents_boundary_and_adds_there():
    parent = BoundaryStates(keep_all=True)
    parent.put(4, *state_of(4))
    children = [BoundaryStates(keep_all=True, parent=parent) for _ in range(2)]
    children[0].put(5, *state_of(5))
    for child in children:
        assert firsts(child.get(4)) == [4, 40]
        child.add_grad(4, *state_of(1))
    children[0].add_grad(5, *state_of(7))
    assert firsts(parent.grad(4)) == [2, 20]
    assert firsts(children[0].grad(5)) == [7, 70]
    assert children[1].grad(5) is None and parent.grad(5) is None
    children[0].truncate(4)
    assert firsts(parent.grad(4)) == [2, 20]


def test_tables_by_kind_and_layer():
    state = PrefixState(StateOptions(exact=True, page_length=4), num_rows=6)
    assert state.rows("kv", 1) is state.rows("kv", 1)
    assert len({id(state.rows(kind, layer)) for kind in ("kv", "latent", "index_key") for layer in (1, 2)}) == 6
    assert state.boundaries(1) is state.boundaries(1)
    assert state.boundaries(1).keep_all
    assert not PrefixState(StateOptions(exact=False)).boundaries(1).keep_all
    assert state.rows("kv", 1).capacity == 6


@pytest.mark.parametrize(("place", "lengths"), [("device", [6]), ("host", [4, 2])])
def test_latents_are_one_page_on_the_device_and_pages_of_page_length_on_the_host(place, lengths):
    residence = OnDevice() if place == "device" else HostStaging(torch.device("cpu"))
    options = StateOptions(exact=True, page_length=4, residence=residence)
    state = PrefixState(options, num_rows=9, num_owned_rows=6)
    state.rows("latent", 1).append(torch.ones(6, 2))
    assert [view.stop - view.start for view in state.rows("latent", 1).pages(6)] == lengths


def test_fork_reaches_the_parents_tables():
    parent = PrefixState(StateOptions(exact=True), num_rows=4)
    parent.rows("kv", 1).append(torch.ones(4, 2))
    parent.boundaries(2).put(1, torch.ones(3))
    child = parent.fork()
    assert child.exact
    child.rows("kv", 1).append(torch.ones(2, 2))
    for view in child.rows("kv", 1).pages(6):
        child.rows("kv", 1).add_grad(view, view.tensors[0])
    assert parent.rows("kv", 1).num_rows == 4
    assert torch.equal(parent.rows("kv", 1).grad(0, 4)[0], torch.ones(4, 2))
    child.boundaries(2).add_grad(1, torch.full((3,), 2.0))
    assert parent.boundaries(2).grad(1)[0].tolist() == [2, 2, 2]


def test_a_branch_behind_a_detached_prompt_takes_gradients_for_itself_alone():
    parent = PrefixState(StateOptions(exact=False), num_rows=4)
    parent.rows("kv", 1).append(torch.ones(4, 2))
    parent.boundaries(2).put(1, torch.ones(3))
    child = parent.fork()
    child.rows("kv", 1).append(torch.ones(2, 2))
    child.boundaries(2).put(2, torch.ones(3))
    assert (parent.walked, child.walked) == (False, True)
    assert [view.page.takes_grad for view in child.rows("kv", 1).pages(6)] == [False, True]
    assert [child.boundaries(2).takes_grad(boundary) for boundary in (1, 2)] == [False, True]
    assert (parent.nbytes()["rows"], child.nbytes()["rows"]) == (32, 16)


def test_sums_of_bfloat16_states_are_float32():
    states = BoundaryStates(keep_all=True)
    states.put(1, torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64))
    for _ in range(300):  # in bfloat16 a sum of ones stops at 256
        states.add_grad(1, torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64))
    tail, recurrent = states.grad(1)
    assert (tail.dtype, recurrent.dtype) == (torch.float32, torch.float64)
    assert tail[0, 0] == recurrent[0] == 300


def test_boundaries_in_host_memory():
    states = BoundaryStates(keep_all=True, residence=HostStaging(torch.device("cpu")))
    tail, recurrent = state_of(2)
    states.put(2, tail, recurrent)
    tail.fill_(-1)
    assert firsts(states.get(2)) == [2, 20]
    states.get(2)[0].fill_(-1)
    assert firsts(states.get(2)) == [2, 20]
    states.add_grad(2, *state_of(3))
    assert firsts(states.grad(2)) == [3, 30]


def test_truncate_walks_every_table_back():
    state = PrefixState(StateOptions(exact=True, page_length=2), num_rows=6)
    for layer in (1, 2):
        state.rows("kv", layer).append(torch.ones(6, 2))
    for boundary in (1, 2, 3):
        state.boundaries(3).put(boundary, torch.ones(2))
        state.experts[5, boundary - 1] = torch.zeros(2, 1, dtype=torch.uint8)
    state.truncate(num_rows=2, boundary=1)
    assert [state.rows("kv", layer).num_rows for layer in (1, 2)] == [2, 2]
    assert state.boundaries(3).get(1) is not None
    with pytest.raises(KeyError):
        state.boundaries(3).get(2)
    assert list(state.experts) == [(5, 0)]


def test_bytes_by_item():
    state = PrefixState(StateOptions(exact=True, page_length=4), num_rows=4)
    state.rows("kv", 1).append(torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16))
    state.boundaries(2).put(1, torch.ones(5))
    state.experts[3, 0] = torch.zeros(4, 2, dtype=torch.uint8)
    empty = {"rows": 32, "rows_grad": 0, "boundaries": 20, "boundaries_grad": 0, "experts": 8}
    assert state.nbytes() == empty
    for view in state.rows("kv", 1).pages(1):
        state.rows("kv", 1).add_grad(view, *(tensor.float() for tensor in view.tensors))
    state.boundaries(2).add_grad(1, torch.ones(5))
    assert state.nbytes() == empty | {"rows_grad": 64, "boundaries_grad": 20}
