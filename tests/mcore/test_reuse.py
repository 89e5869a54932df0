"""A detached prompt's state over optimizer steps: what is run, what the gradient is, and what is said about drift."""

from collections import Counter

import pytest
import torch
from harness import Layout, build_learner, fill_from_hf, make_groups, prompt_groups
from oracle import glm_config, make_model, qwen_config

from longstraw_megatron.schedule import Op
from longstraw_megatron.testing import run_ranks

SHAPES = [(40, [6, 9]), (23, [5, 3])]


def _steps(rank, world_size, layout, hf, weights, groups, change, num_steps):
    """Gradients, state metrics and counts of actions of each of `num_steps` steps; weights change by `change`."""
    learner, context = build_learner(layout, hf, detached=True)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    counts: Counter = Counter()
    learner.engine.progress = lambda action: counts.update([action.op])
    groups = prompt_groups(groups)
    results = []
    for _ in range(num_steps):
        counts.clear()
        learner.compute_gradients(list(groups))
        named = [item for chunk in learner.chunks for item in chunk.named_parameters()]
        grads = {name: parameter.main_grad.clone() for name, parameter in named if parameter.requires_grad}
        results.append((grads, dict(learner.state_metrics), Counter(counts)))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(5)
            for _, parameter in named:
                parameter += change * torch.randn(parameter.shape, generator=generator)
    return results


def _run(model, layout, *, change=0.0, num_steps=4):
    hf = model.config.to_dict() | {"architectures": [type(model).__name__]}
    args = (layout, hf, dict(model.state_dict()), make_groups(*SHAPES), change, num_steps)
    return run_ranks(layout.world_size, _steps, *args, timeout=400)


@pytest.fixture(scope="module", params=["qwen", "glm"])
def model(request):
    is_qwen = request.param == "qwen"
    return make_model(qwen_config(num_hidden_layers=4) if is_qwen else glm_config(index_n_heads=4, num_hidden_layers=7))


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_with_the_same_weights_nothing_changes_and_nothing_is_prefilled(model):
    (fresh,) = _run(model, Layout(segment_length=16), num_steps=1)
    (kept,) = _run(model, Layout(segment_length=16, reuse_steps=2))
    assert all(_same(grads, fresh[0][0]) for grads, _, _ in kept)
    assert [counts[Op.PREFILL] for _, _, counts in kept] == [5, 0, 0, 5]
    assert [counts[Op.FORWARD] for _, _, counts in kept] == [4, 4, 4, 4]
    assert [metrics for _, metrics, _ in kept] == [{"state/reuse_age": float(age)} for age in (0, 1, 2, 0)]
    assert fresh[0][1] == {}


def test_state_is_that_of_older_weights(model):
    (fresh,) = _run(model, Layout(segment_length=16), change=1e-2, num_steps=2)
    (kept,) = _run(model, Layout(segment_length=16, reuse_steps=1), change=1e-2, num_steps=3)
    assert _same(kept[0][0], fresh[0][0]) and not _same(kept[1][0], fresh[1][0])
    assert [counts[Op.PREFILL] for _, _, counts in kept] == [5, 0, 5]


@pytest.mark.parametrize("change", [0.0, 1e-2])
def test_drift_is_measured_against_a_fresh_capture(model, change):
    (kept,) = _run(model, Layout(segment_length=16, reuse_steps=3, reuse_check_every=2), change=change)
    assert [set(metrics) == {"state/reuse_age"} for _, metrics, _ in kept] == [True, True, False, True]
    metrics = kept[2][1]
    assert [counts[Op.PREFILL] for _, _, counts in kept] == [5, 0, 2, 0]  # the sample's: 22 tokens
    if change == 0:
        assert metrics["state/reuse_logprob_change"] == metrics["state/reuse_loss_drift"] == 0
    else:
        assert metrics["state/reuse_logprob_change"] > 1e-4 and abs(metrics["state/reuse_loss_drift"]) > 1e-7


def test_ranks_in_lockstep_prefill_together():
    """Both data-parallel ranks of an expert group reuse in the same step, and one holds a larger group."""
    model = make_model(glm_config(index_n_heads=4, num_hidden_layers=7))
    layout = Layout(dp=2, ep=2, segment_length=16, reuse_steps=1, reuse_check_every=1)
    for results in _run(model, layout, num_steps=3):
        assert _same(results[0][0], results[1][0]) and _same(results[0][0], results[2][0])
        assert [metrics["state/reuse_age"] for _, metrics, _ in results] == [0, 1, 0]
        assert results[1][1]["state/reuse_logprob_change"] < 1e-6
