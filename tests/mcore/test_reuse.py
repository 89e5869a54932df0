"""A detached prompt's state over optimizer steps: what is run, what the gradient is, and what is said about drift."""

from collections import Counter

import numpy as np
import pytest
import torch
from harness import Layout, build_learner, fill_from_hf, make_groups, prompt_groups
from oracle import glm_config, make_model, qwen_config

from longstraw_megatron.mcore.reuse import drift_sample, loss_drift
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


def _drifts(rank, world_size, layout, hf, weights, groups, change):
    """State metrics of a second step, and logprobs of all branches with the kept state and with a fresh capture."""
    learner, context = build_learner(layout, hf, detached=True)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    groups = prompt_groups(groups)
    learner.compute_gradients(groups)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in learner.chunks[0].parameters():
            parameter += change * torch.randn(parameter.shape, generator=generator)
    _, stale = learner.compute_gradients(groups)
    return dict(learner.state_metrics), stale, learner.score(groups)


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


def _measured(advantages):
    """`_drifts` of a long prompt and a short one, with `advantages` [groups][branches]."""
    model = make_model(qwen_config(num_hidden_layers=4))
    hf = model.config.to_dict() | {"architectures": [type(model).__name__]}
    groups = [group | {"advantages": a} for group, a in zip(make_groups(*SHAPES), advantages, strict=True)]
    layout = Layout(segment_length=16, reuse_steps=1, reuse_check_every=1)
    ((metrics, stale, fresh),) = run_ranks(1, _drifts, layout, hf, dict(model.state_dict()), groups, 1e-3)
    return metrics, stale, fresh


def test_loss_drift_is_relative_and_of_a_branch_with_an_advantage():
    """The short prompt's shortest branch has none. A loss is -A times the mean ratio to the kept state's logprobs."""
    metrics, stale, fresh = _measured([[1.0, -1.0], [-0.7, 0.0]])
    place = (1, 0)
    ratio = np.exp(fresh[place] - stale[place]).mean()
    assert metrics["state/reuse_loss_drift"] == pytest.approx((1 - ratio) / ratio, rel=1e-4)
    assert abs(metrics["state/reuse_loss_drift"]) > 1e-4
    change = np.abs(fresh[place] - stale[place]).mean()
    assert metrics["state/reuse_logprob_change"] == pytest.approx(change, rel=1e-6)


def test_loss_drift_is_absent_where_the_loss_is_zero():
    metrics, stale, fresh = _measured([[0.0, 0.0], [0.0, 0.0]])
    assert set(metrics) == {"state/reuse_age", "state/reuse_logprob_change"}
    assert metrics["state/reuse_logprob_change"] == pytest.approx(np.abs(fresh[1, 1] - stale[1, 1]).mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("advantages", "masks", "place"),
    [
        ([[1.0, -1.0], [1.0, -1.0]], {}, (1, 1)),
        ([[1.0, -1.0], [1.0, 0.0]], {}, (1, 0)),
        ([[1.0, -1.0], [0.0, 0.0]], {}, (0, 0)),
        ([[0.0, 0.0], [0.0, 0.0]], {}, (1, 1)),
        ([[1.0, -1.0], [1.0, -1.0]], {(1, 1)}, (1, 0)),
        ([[0.0, 0.0], [1.0, -1.0]], {(1, 0), (1, 1)}, (0, 0)),
    ],
    ids=["shortest", "with an advantage", "in another group", "none has one", "not masked", "no token before no gain"],
)
def test_drift_is_measured_where_it_says_something(advantages, masks, place):
    groups = make_groups(*SHAPES)
    for g, group in enumerate(groups):
        group["masks"] = [[int((g, b) not in masks)] * len(tokens) for b, tokens in enumerate(group["responses"])]
    assert drift_sample(prompt_groups(groups), advantages) == place


def test_prompts_of_one_token_have_no_state_to_drift():
    groups = prompt_groups(make_groups((1, [6, 9]), *SHAPES))
    assert drift_sample(groups, [[1.0, -1.0]] * 3) == (2, 1)
    assert drift_sample(groups[:1], [[1.0, -1.0]]) is None


def test_loss_drift_is_signed_as_the_loss_moves():
    assert loss_drift(-3.0, -2.0) == -0.5 and loss_drift(3.0, 2.0) == 0.5 and loss_drift(1.0, 0.0) is None
