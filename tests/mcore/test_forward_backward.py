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


def _both(rank, world_size, pipeline, sizes, kind, shapes, changes, packed=False):
    """Gradients and returned data of both sides on this rank, compared; the overall error of the gradient."""
    groups = init_megatron(vpp=pipeline.vpp if pipeline.vpp > 1 else None, **sizes)
    microbatches = make_microbatches(*shapes[groups.dp.rank() % len(shapes)], seed=groups.dp.rank())
    num_samples = torch.tensor(sum(m.group.group_size for m in microbatches))
    dist.all_reduce(num_samples, group=groups.dp)
    loss = Loss(kind, len(microbatches), int(num_samples))
    arguments = {"force_all_reduce": pipeline.ddp.get("use_distributed_optimizer", False)}
    extra = {"pg_collection": groups, "p2p_communicator": None} if world_size == 1 else {}
    stock, want = run_stock(pipeline, groups, microbatches, loss, **arguments)
    ours = pipeline.build(groups, ours=True)
    func = longstraw_megatron.get_forward_backward_func(options=_options(**changes))
    multiple = changes.get("sample_multiple", 2 * groups.cp.size() * (groups.tp.size() if pipeline.sp else 1))
    for _ in range(2):  # gradients are fresh, and nothing is left over from the step before
        got = run_step(func, ours, microbatches, loss, multiple=multiple, packed=packed, **(arguments | extra))
    assert [data["name"] for data in got] == [data["name"] for data in want]
    if groups.cp.size() == 1:
        for mine, theirs in zip(got, want, strict=True):
            assert abs(mine["loss"] - theirs["loss"]) <= 1e-5 * max(1.0, abs(theirs["loss"]))
    want_grads = grads(stock)
    if groups.tp.size() > 1 and not pipeline.sp:
        for name, grad in want_grads.items():  # Megatron forgets to
            if "out_norm" in name:
                dist.all_reduce(grad, group=groups.tp)
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
        Pipeline(overrides={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        "scaled",
        {},
    ),
    "loss scale": (Pipeline(overrides={"grad_scale_func": lambda loss: loss * 64}), "scaled", {}),
    "two prefixes live": (Pipeline(), "scaled", {"max_live_prefixes": 2}),
    "state on the host": (Pipeline(), "scaled", {"location": "host"}),
    "sparse attention and experts": (Pipeline(model="glm"), "scaled", {}),
}


@pytest.mark.parametrize("name", ONE)
def test_gradient_is_that_of_full_sequences_on_one_rank(name):
    pipeline, kind, changes = ONE[name]
    run_ranks(1, _both, pipeline, {}, kind, [SHAPES], changes)


@pytest.mark.parametrize("sizes", [{}, {"cp": 2}])
def test_a_packed_batch_of_one_sample_with_padding_behind_it(sizes):
    run_ranks(2 if sizes else 1, _both, Pipeline(), sizes, "scaled", [SHAPES], {}, True)


# over gloo, Megatron's batched transfers between two ranks that are both neighbours swap activations and gradients
VPP = Pipeline(vpp=2, overrides={"batch_p2p_comm": False})
TWO = {
    "pp2": (Pipeline(), {"pp": 2}, "scaled", {}),
    "pp2 per token": (PER_TOKEN, {"pp": 2}, "token sum", {}),
    "pp2 vpp2": (VPP, {"pp": 2}, "scaled of 3", {}),
    "pp2 vpp2, means": (VPP, {"pp": 2}, "mean", BRANCHES),
    "tp2 sp": (Pipeline(sp=True), {"tp": 2}, "scaled", {}),
    "tp2": (Pipeline(), {"tp": 2}, "scaled", {}),
    "cp2": (Pipeline(), {"cp": 2}, "scaled", {}),
    "cp2, samples padded": (Pipeline(), {"cp": 2}, "scaled", {"sample_multiple": 16}),
    "cp2, 3-tuple": (Pipeline(), {"cp": 2}, "scaled of 3", {}),
    "cp2 per token": (PER_TOKEN, {"cp": 2}, "token sum", {}),
    "dp2": (Pipeline(), {}, "scaled", {}),
    "dp2 per token": (PER_TOKEN, {}, "token sum", {}),
    "dp2, reductions overlapped": (Pipeline(ddp={"overlap_grad_reduce": True, "bucket_size": 4000}), {}, "scaled", {}),
    "dp2, distributed optimizer": (Pipeline(ddp={"use_distributed_optimizer": True}), {}, "mean", BRANCHES),
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


def _wrong_divisor(rank, world_size, kind, divide_by):
    groups = init_megatron()
    microbatches = make_microbatches(*SHAPES)
    loss = Loss(kind, len(microbatches), 6)
    stock, _ = run_stock(Pipeline(), groups, microbatches, loss)
    ours = Pipeline().build(groups, ours=True)
    func = longstraw_megatron.get_forward_backward_func(options=_options(divide_by=divide_by))
    run_step(func, ours, microbatches, loss)
    return grads(ours), grads(stock)


@pytest.mark.parametrize(("kind", "divide_by", "factor"), [("scaled", "branches", 2.0), ("mean", "microbatches", 0.5)])
def test_the_other_divisor_is_off_by_the_branches_of_a_group(kind, divide_by, factor):
    """The trap: what a loss was multiplied by must be what it is divided by. Six branches in three groups."""
    ((got, want),) = run_ranks(1, _wrong_divisor, kind, divide_by)
    assert compare_tensors(got, want).overall > 0.4
    assert_gradients_close({name: grad * factor for name, grad in got.items()}, want)


def _detached(rank, world_size):
    groups = init_megatron()
    microbatches = make_microbatches((13, [5, 1, 9]))
    loss = Loss("scaled", 1, 3)
    stock, want = run_stock(Pipeline(), groups, microbatches, loss)
    ours = Pipeline().build(groups, ours=True)
    func = longstraw_megatron.get_forward_backward_func(options=_options(exact=False))
    got = run_step(func, ours, microbatches, loss)
    return (
        [d["loss"].item() for d in got],
        [d["loss"].item() for d in want],
        compare_tensors(grads(ours), grads(stock)).overall,
    )


def test_detached_has_the_losses_and_misses_the_gradient():
    ((got, want, error),) = run_ranks(1, _detached)
    assert got == pytest.approx(want, rel=1e-5)
    assert error > 0.05


def _forward_only(rank, world_size, sizes, vpp, collect):
    groups = init_megatron(vpp=vpp if vpp > 1 else None, **sizes)
    pipeline = Pipeline(vpp=vpp, overrides={"batch_p2p_comm": False})
    microbatches = make_microbatches(*SHAPES)
    loss = Loss("scaled", len(microbatches), 6)
    arguments = {"forward_only": True, "collect_non_loss_data": collect}
    _, want = run_stock(pipeline, groups, microbatches, loss, **arguments)
    ours = pipeline.build(groups, ours=True)
    before = grads(ours)
    func = longstraw_megatron.get_forward_backward_func(options=_options())
    bare = [chunk.module for chunk in ours]  # a reference model is in no DDP
    multiple = 2 * groups.cp.size()
    got = run_step(func, bare, microbatches, loss, multiple=multiple, keep=True, **arguments)
    assert all(torch.equal(grad, before[name]) for name, grad in grads(ours).items())
    return got, want


@pytest.mark.parametrize("collect", [True, False])
@pytest.mark.parametrize(("sizes", "vpp"), [({}, 1), ({"pp": 2}, 1), ({"pp": 2}, 2), ({"cp": 2}, 1)])
def test_forward_only_gives_the_logprobs_of_full_sequences_without_a_graph(sizes, vpp, collect):
    results = run_ranks(2 if sizes else 1, _forward_only, sizes, vpp, collect)
    assert any(got for got, _ in results)
    for got, want in results:
        assert [data["name"] for data in got] == [data["name"] for data in want]
        for mine, theirs in zip(got, want, strict=True):
            if collect:
                assert not mine["with_graph"]
                assert mine["logprobs"].item() == pytest.approx(theirs["logprobs"].item(), rel=1e-5)
            elif "cp" not in sizes:
                assert mine["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-5, abs=1e-5)


def _accumulated(rank, world_size, sizes):
    """One call per group, finalized by the caller at the end, against one call of Megatron's over everything."""
    from megatron.core.distributed import finalize_model_grads

    groups = init_megatron(**sizes)
    microbatches = make_microbatches(*SHAPES)
    stock, _ = run_stock(Pipeline(), groups, microbatches, Loss("scaled", len(microbatches), 6))
    ours = Pipeline(overrides={"finalize_model_grads_func": None}).build(groups, ours=True)
    for chunk in ours:
        chunk.config.no_sync_func = chunk.config.grad_sync_func = _never
    func = longstraw_megatron.get_forward_backward_func(options=_options())
    for i, microbatch in enumerate(microbatches):
        run_step(func, ours, [microbatch], Loss("scaled", 1, 6), keep=i > 0)
    finalize_model_grads(ours, pg_collection=groups)
    want = grads(stock)
    for name, grad in want.items():
        if groups.tp.size() > 1 and "out_norm" in name:
            dist.all_reduce(grad, group=groups.tp)
    return assert_gradients_close(grads(ours), want).overall


def _never(*_args):
    raise AssertionError("gradients were sent before the step's end")


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"tp": 2}, {}])
def test_a_caller_may_accumulate_over_calls_and_finalize_itself(sizes):
    run_ranks(2 if sizes else 1, _accumulated, sizes)
