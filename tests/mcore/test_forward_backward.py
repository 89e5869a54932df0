"""`get_forward_backward_func` on prompt groups against Megatron's own schedule on full sequences, in the same layout.

Both sides run the same forward step and losses; the dense side has stock modules and one full sequence per microbatch.
"""

import pytest
import torch
import torch.distributed as dist
from pipeline_steps import Loss, Pipeline, grads, make_microbatches, run_step, run_stock

import longstraw_megatron
from longstraw_megatron.testing import assert_gradients_close, compare_tensors, run_ranks
from longstraw_megatron.testing.megatron import init_megatron

SHAPES = [(13, [5, 1, 9]), (7, [4, 6]), (1, [8])]


def _options(**changes) -> longstraw_megatron.PromptOptions:
    return longstraw_megatron.PromptOptions(**{"segment_length": 5, "page_length": 8} | changes)


def _both(rank, world_size, pipeline, sizes, kind, shapes, changes, expect=None):
    """Gradients and returned data of both sides on this rank, compared; the comparison's overall error."""
    groups = init_megatron(vpp=pipeline.vpp if pipeline.vpp > 1 else None, **sizes)
    microbatches = make_microbatches(*shapes[groups.dp.rank() % len(shapes)], seed=groups.dp.rank())
    num_samples = torch.tensor(sum(m.group.group_size for m in microbatches))
    dist.all_reduce(num_samples, group=groups.dp)
    loss = Loss(kind, len(microbatches), int(num_samples))
    stock, want = run_stock(pipeline, groups, microbatches, loss)
    ours = pipeline.build(groups, ours=True)
    func = longstraw_megatron.get_forward_backward_func(options=_options(**changes))
    multiple = 2 * groups.cp.size() * (groups.tp.size() if pipeline.sp else 1)
    for _ in range(2):  # gradients are fresh, and nothing is left over from the step before
        got = run_step(func, ours, microbatches, loss, multiple=multiple)
    assert [data["name"] for data in got] == [data["name"] for data in want]
    if groups.cp.size() == 1:
        for mine, theirs in zip(got, want, strict=True):
            assert abs(mine["loss"] - theirs["loss"]) <= 1e-5 * max(1.0, abs(theirs["loss"]))
    want_grads = grads(stock)
    if groups.tp.size() > 1 and not pipeline.sp:
        for name, grad in want_grads.items():  # Megatron forgets to
            if "out_norm" in name:
                dist.all_reduce(grad, group=groups.tp)
    if expect is not None:
        return compare_tensors(grads(ours), want_grads).overall
    return assert_gradients_close(grads(ours), want_grads).overall


PER_TOKEN = Pipeline(per_token=True)
BRANCHES = {"divide_by": "branches"}
ONE = {
    "2-tuple times its microbatches": (Pipeline(), "scaled", {}),
    "3-tuple times its microbatches": (Pipeline(), "scaled of 3", {}),
    "2-tuple mean of the sample": (Pipeline(), "mean", BRANCHES),
    "3-tuple, a sum and its tokens": (Pipeline(), "mean of 3", BRANCHES),
    "per token": (PER_TOKEN, "token sum", {}),
    "per token, whatever the divisor": (PER_TOKEN, "token sum", BRANCHES),
    "full recompute": (
        Pipeline(
            overrides={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        ),
        "scaled",
        {},
    ),
    "two prefixes live": (Pipeline(), "scaled", {"max_live_prefixes": 2}),
    "sparse attention and experts": (Pipeline(model="glm"), "scaled", {}),
}


@pytest.mark.parametrize("name", ONE)
def test_gradient_is_that_of_full_sequences_on_one_rank(name):
    pipeline, kind, changes = ONE[name]
    run_ranks(1, _both, pipeline, {}, kind, [SHAPES], changes)


TWO = {
    "pp2": (Pipeline(), {"pp": 2}, "scaled", {}),
    "pp2 per token": (PER_TOKEN, {"pp": 2}, "token sum", {}),
    "pp2 vpp2": (Pipeline(vpp=2), {"pp": 2}, "scaled of 3", {}),
    "pp2 vpp2, means": (Pipeline(vpp=2), {"pp": 2}, "mean", BRANCHES),
    "tp2 sp": (Pipeline(sp=True), {"tp": 2}, "scaled", {}),
    "tp2": (Pipeline(), {"tp": 2}, "scaled", {}),
    "cp2": (Pipeline(), {"cp": 2}, "scaled", {}),
    "cp2, 3-tuple": (Pipeline(), {"cp": 2}, "scaled of 3", {}),
    "cp2 per token": (PER_TOKEN, {"cp": 2}, "token sum", {}),
    "dp2": (Pipeline(), {}, "scaled", {}),
    "dp2 per token": (PER_TOKEN, {}, "token sum", {}),
    "dp2, reductions overlapped": (Pipeline(ddp={"overlap_grad_reduce": True, "bucket_size": 4000}), {}, "scaled", {}),
    "dp2 ep2": (Pipeline(model="glm"), {"ep": 2}, "scaled", {}),
}
# as many branches on both data-parallel ranks, since Megatron's schedule wants it, in groups of other shapes and number
RAGGED = [[(13, [5, 1, 9]), (7, [4])], [(30, [2, 6]), (1, [3]), (9, [4])]]


@pytest.mark.parametrize("name", TWO)
def test_gradient_is_that_of_full_sequences_on_two_ranks(name):
    pipeline, sizes, kind, changes = TWO[name]
    is_dp = not any(sizes.get(axis, 1) > 1 for axis in ("tp", "pp", "cp"))
    shapes = RAGGED if is_dp else [[*SHAPES, (4, [3, 2])] if pipeline.vpp > 1 else SHAPES]
    run_ranks(2, _both, pipeline, sizes, kind, shapes, changes)
