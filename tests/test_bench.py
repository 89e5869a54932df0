"""`longstraw bench`: its workers' gradients and bytes, its JSON and tables, and what it does when a worker fails."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.bench import door, launch, report, workload
from longstraw_megatron.bench.launch import Failure
from longstraw_megatron.bench.worker import method_config
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import resolve_auto
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.testing import run_ranks

SIZES = ("prompt_length=65", "response_length=8", "group_size=2", "segment_length=32", "bench.repeats=1")
TINY = ("device=cpu", "model.hf_config.num_hidden_layers=4", *SIZES)  # three layers of delta rule, one of attention


def tiny_config(*overrides: str):
    return resolve_auto(load_config([*TINY, *overrides]), cuda_available=False)


@pytest.fixture(scope="module")
def printed():
    """What the command prints as JSON, and its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *words, file=None, **_: lines.append(words[0]) if file is None else None)
        code = door.main([*TINY, "format=json", "bench.methods=[dense,exact,detached]"])
    return code, json.loads("\n".join(lines))


def test_command_compares_the_methods(printed):
    code, result = printed
    assert code == 0
    assert [run["method"] for run in result["runs"]] == ["dense", "exact", "detached"]
    shape = {"prompt_length": 65, "response_length": 8, "group_size": 2, "segment_length": 32, "num_ranks": 1}
    assert shape.items() <= result.items()
    dense, exact, detached = result["runs"]
    assert dense["ratios"]["speedup"] == dense["ratios"]["memory"] == 1
    for run in result["runs"]:
        assert run["error"] is None and run["seconds"] > 0 and run["cpu_seconds"] > 0 and run["peak_bytes"] > 0
        assert run["ratios"]["speedup"] == dense["seconds"] / run["seconds"]
        assert run["sent_bytes"] == 0
    # 64 prefix tokens and 2 responses of 8: 3 passes over 72 tokens twice; 1 + 3 passes over the prefix; 1 pass
    dense_cost, exact_cost, detached_cost = 2 * 72 * 3, 64 * 4 + 16 * 3, 64 + 16 * 3
    assert exact["ratios"]["ceiling"] == dense_cost / exact_cost
    assert detached["ratios"]["ceiling"] == dense_cost / detached_cost


def test_gradient_of_exact_is_that_of_dense_and_of_detached_is_not(printed):
    dense, exact, detached = printed[1]["runs"]
    assert dense["grad_norm"] > 0
    # two float32 orders of summation over 72 tokens and 4 layers; DESIGN's bound for a whole gradient
    assert exact["ratios"]["grad_norm_error"] <= 1e-5
    assert exact["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    assert detached["ratios"]["grad_norm_error"] > 1e-3


def test_phases_and_state(printed):
    dense, exact, detached = printed[1]["runs"]
    assert set(dense["phases"]) == {"forward", "backward", "reduce"}
    assert set(detached["phases"]) == {"prefill", "replay", "branch_backward", "reduce"}
    assert set(exact["phases"]) == {*detached["phases"], "prompt_backward"}
    assert dense["phases"]["forward"]["tokens"] == 2 * 72 and dense["phases"]["forward"]["units"] == 2
    assert exact["phases"]["prompt_backward"]["tokens"] == 64 and exact["phases"]["prompt_backward"]["units"] == 2
    keys = 64 * 2 * 2 * 32 * 4  # tokens, k and v, key heads, head dim, float32
    boundary = 3 * (3 * 160 + 6 * 16 * 16) * 4  # layers, convolution tail and recurrent state, float32
    assert dense["state_bytes"] == 0
    assert detached["state_bytes"] == keys + boundary
    # both boundaries, and the gradient of keys and of the boundary that branches start from
    assert exact["state_bytes"] == 2 * keys + 3 * boundary


def measure_rank(rank, world_size, config, method):
    from longstraw_megatron.bench.worker import measure

    return measure(config, method)


def test_bytes_of_context_parallelism():
    config = tiny_config("parallel.cp=2")
    reports = {method: run_ranks(2, measure_rank, config, method) for method in ("dense", "detached")}
    # qkv of 160 channels, two gates and the output of 6 heads: half of each goes to the other rank, float32
    row = (160 + 2 * 6 + 6 * 16) // 2 * 4
    rows = {"detached": 64 // 2 + 2 * 2 * 8 // 2, "dense": 2 * 2 * 72 // 2}  # prefill; forward and backward of branches
    for method, ranks in reports.items():
        for rank in ranks:
            assert rank.sent_by_purpose["delta_heads"] == 3 * rows[method] * row
            assert sum(phase.sent_bytes for phase in rank.phases.values()) == sum(rank.sent_by_purpose.values())
    assert [rank.rank for rank in reports["dense"]] == [0, 1]
    assert reports["dense"][0].grad_norm == reports["dense"][1].grad_norm


def test_recompute_and_exact_in_two_ranks():
    config = tiny_config("parallel.tp=2")
    reports = {method: run_ranks(2, measure_rank, config, method)[0] for method in ("dense_recompute", "exact")}
    assert reports["exact"].grad_norm == pytest.approx(reports["dense_recompute"].grad_norm, rel=1e-5)
    assert set(reports["exact"].sent_by_purpose) == set()


def test_dense_group_is_the_same_objective():
    from longstraw_megatron.mcore.dense import dense_group

    branches = (
        Branch([7, 8, 9], reward=1.0, loss_mask=[1, 0, 1], old_logprobs=[-1.0, -2.0, -3.0]),
        Branch([5], reward=0.0),
    )
    dense = dense_group(PromptGroup("g", [1, 2, 3], branches))
    assert len(dense.prefix_tokens) == 0
    assert dense.input_tokens(0).tolist() == [1, 2, 3, 7, 8] and dense.target_tokens(0).tolist() == [-1, -1, 7, 8, 9]
    assert dense.input_tokens(1).tolist() == [1, 2, 3] and dense.target_tokens(1).tolist() == [-1, -1, 5]
    assert dense.branches[0].loss_mask.tolist() == [0, 0, 1, 0, 1] and dense.loss_tokens == (2, 1)
    assert dense.branches[0].old_logprobs.tolist() == [0, 0, -1, -2, -3] and dense.branches[1].old_logprobs is None
    assert [branch.reward for branch in dense.branches] == [1.0, 0.0]
    with pytest.raises(ValueError, match="routed_experts"):
        dense_group(PromptGroup("g", [1, 2], (Branch([5], reward=0.0, routed_experts=np.zeros((1, 1, 1), int)),)))


@pytest.mark.parametrize("num_targets", [0, 1, 3, 8])
def test_head_makes_logits_for_targets_only(num_targets):
    from longstraw_megatron.functional.logprobs import logprobs
    from longstraw_megatron.mcore.head import LogprobHead
    from longstraw_megatron.testing.memory import largest_tensor

    hidden = torch.randn(8, 1, 4, dtype=torch.float64, requires_grad=True)
    layer = torch.nn.Linear(4, 1000, bias=False, dtype=torch.float64)
    targets = torch.full((8,), -1)
    targets[torch.randperm(8)[:num_targets]] = torch.randint(0, 1000, (num_targets,))
    wanted = logprobs(hidden[:, 0], layer.weight, targets)
    alone, config = SimpleNamespace(rank=lambda: 0, size=lambda: 1), SimpleNamespace(sequence_parallel=False)
    with largest_tensor() as largest:
        got = LogprobHead(targets, alone)(hidden, layer, None, config)
    assert torch.allclose(got, wanted, rtol=1e-12, atol=0)
    weights = torch.randn(8, dtype=torch.float64)
    inputs = (hidden, layer.weight)
    pairs = zip(*(torch.autograd.grad(out, inputs, weights) for out in (got, wanted)), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in pairs)
    if num_targets == 3:
        assert largest.nbytes == 3 * 1000 * 8


def fake_rank(rank: int, *, norm: float, seconds: list[float], peak: int) -> dict:
    phase = {"seconds": min(seconds), "tokens": 10, "units": 4, "peak_bytes": peak, "sent_bytes": 400 * (rank + 1)}
    return {
        "rank": rank, "seconds": seconds, "cpu_seconds": seconds, "loaded_bytes": 1, "peak_bytes": peak,
        "state_bytes": {"rows": 3, "boundaries": 2}, "loss": 0.5, "grad_norm": norm, "phases": {"replay": phase},
        "sent_by_purpose": {"queries": 400 * (rank + 1)},
    }  # fmt: skip


def test_report_of_ranks_and_failures():
    config = tiny_config("bench.repeats=2", "parallel.cp=2")
    results = {
        "dense": [
            fake_rank(0, norm=2.0, seconds=[8.0, 6.0], peak=100),
            fake_rank(1, norm=2.0, seconds=[7.0, 9.0], peak=90),
        ],
        "dense_recompute": Failure("out of memory"),
        "exact": [fake_rank(r, norm=2.0 + 1e-4, seconds=[2.0, 3.0], peak=25) for r in (0, 1)],
    }
    result = report.make_report(config, results, num_ranks=2)
    dense, failed, exact = result["runs"]
    assert dense["seconds"] == 8.0 and dense["cpu_seconds"] == 15.0 and dense["peak_bytes"] == 100
    assert dense["phases"]["forward"]["sent_bytes_per_unit"] == 200 and dense["state_bytes"] == 5
    assert exact["ratios"]["speedup"] == 4.0 and exact["ratios"]["memory"] == 0.25
    assert failed["error"] == "out of memory" and failed["ratios"]["speedup"] is None
    assert report.wrong_gradients(result) == ["exact"]
    text = report.format_report(result)
    assert "out of memory" in text and "sent per pass" in text and "exact" in text
    assert json.loads(json.dumps(result)) == result
    alone = report.make_report(config, {"exact": results["exact"]}, num_ranks=2)
    assert alone["runs"][0]["ratios"]["speedup"] is None and report.wrong_gradients(alone) == []


def run_script(monkeypatch, script: str, num_ranks: int = 1):
    command = lambda method, folder, overrides, ranks: [sys.executable, "-c", script, folder]  # noqa: E731
    monkeypatch.setattr(launch, "worker_command", command)
    return launch.run_method("exact", [], num_ranks=num_ranks)


WRITES = "import json, sys, os; open(sys.argv[1] + '/{name}.json', 'w').write(json.dumps({outcome})); "


def test_a_worker_that_fails(monkeypatch, capsys):
    killed = run_script(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert isinstance(killed, Failure) and "signal 9" in killed.reason
    silent = run_script(monkeypatch, "print('last words'); raise SystemExit(3)", num_ranks=2)
    assert silent == Failure("2 of 2 ranks ended without a report, exit 3")
    assert "last words" in capsys.readouterr().err
    outcome = {"report": None, "error": "out of memory: 3 GiB", "is_refusal": False}
    assert run_script(monkeypatch, WRITES.format(name=1, outcome=outcome)) == Failure("out of memory: 3 GiB")
    refused = {"report": None, "error": "The layout is odd.", "is_refusal": True}
    with pytest.raises(RefusedError, match="The layout is odd"):
        run_script(monkeypatch, WRITES.format(name=1, outcome=refused))


def test_reports_come_in_rank_order_and_the_allocator_is_told(monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    script = "".join(
        WRITES.format(name=name, outcome={"report": {"rank": rank}, "error": None, "is_refusal": False})
        for name, rank in (("11", 1), ("12", 0))
    )
    assert run_script(monkeypatch, script, num_ranks=2) == [{"rank": 0}, {"rank": 1}]
    environment = launch.worker_environment(2)
    assert environment["MALLOC_ARENA_MAX"] == "1" and environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("overrides", "num_ranks"),
    [((), 1), (("parallel.cp=2", "parallel.tp=2"), 4), (("parallel.ep=4", "parallel.cp=2"), 4)],
)
def test_number_of_ranks(overrides, num_ranks):
    assert door.num_ranks_of(tiny_config(*overrides)) == num_ranks


def test_workload_is_the_keys():
    (group,) = workload.make_groups(tiny_config("group_size=3"), 1)
    assert len(group.prompt_tokens) == 65 and group.response_lengths == (8, 8, 8)
    assert math.isclose(sum(branch.advantage for branch in group.branches), -1.0 + 0.15 + 1.3)
    again, other = workload.make_groups(tiny_config("group_size=3"), 2)
    assert (again.prompt_tokens == group.prompt_tokens).all() and (other.prompt_tokens != group.prompt_tokens).any()


def test_a_dense_pass_is_never_in_blocks():
    config = tiny_config("response_block=8")
    for method, block in (("dense", None), ("dense_recompute", None), ("exact", 8), ("detached", 8)):
        assert method_config(config, method).response_block == block


def test_steps_that_reuse_state_are_refused():
    with pytest.raises(RefusedError, match="state.reuse_steps=1 is for steps that follow each other"):
        door.main(["gradient=detached", "state.reuse_steps=1", "device=cpu"])


def test_unknown_method_is_refused():
    with pytest.raises(RefusedError, match="bench.methods"):
        tiny_config("bench.methods=[sparse]")
