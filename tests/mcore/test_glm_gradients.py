"""GLM on one process: every parameter's gradient against Hugging Face's, in every awkward shape, with 4 index heads
(many ties) and with 32."""

import pytest
from glm_oracle import glm_truth
from harness import Layout, assert_equals_oracle, make_groups, run_layout
from oracle import dense_grpo, glm_config, make_model

# the selection is of 16 tokens, of 4 times as many and more
SHAPES = {
    "prompt several times the selection": (Layout(segment_length=32), [(70, [20, 1, 33])]),
    "segments as long as the selection": (Layout(segment_length=16), [(65, [20, 7, 33])]),
    "prompt of one token": (Layout(), [(1, [9, 1, 20])]),
    "prompt of two tokens": (Layout(), [(2, [9, 1, 20])]),
    "segment of one token": (Layout(segment_length=1), [(24, [9, 1])]),
    "segment longer than the prompt": (Layout(segment_length=1000), [(40, [9, 20])]),
    "one branch of one token": (Layout(), [(100, [1])]),
    "full recompute": (Layout(segment_length=16, recompute="full"), [(70, [20, 1, 33])]),
    "selective recompute": (Layout(segment_length=16, recompute="selective"), [(70, [20, 1, 33])]),
    "branches packed": (Layout(branches_per_microbatch=3), [(70, [20, 1, 33])]),
    "branches packed, one left over, recompute": (
        Layout(branches_per_microbatch=2, recompute="full"),
        [(70, [20, 1, 33])],
    ),
    "branches longer than the prompt": (Layout(segment_length=4, branches_per_microbatch=2), [(6, [40, 30])]),
    "several groups of different shape": (
        Layout(branches_per_microbatch=2, segment_length=32),
        [(90, [4, 11]), (1, [5]), (37, [8, 1, 3])],
    ),
}


@pytest.fixture(scope="module", params=[4, 32], ids=["4_index_heads", "32_index_heads"])
def model(request):
    return make_model(glm_config(index_n_heads=request.param))


@pytest.mark.parametrize("name", SHAPES)
def test_exact_gradient_is_that_of_full_sequences(model, name):
    layout, shapes = SHAPES[name]
    groups = make_groups(*shapes)
    truth = glm_truth(model, groups)
    assert_equals_oracle(run_layout(layout, model, truth, groups), truth)


@pytest.mark.parametrize("name", ["prompt several times the selection", "prompt of one token", "branches packed"])
def test_detached_gradient_is_that_of_a_detached_cache(model, name):
    layout, shapes = SHAPES[name]
    groups = make_groups(*shapes)
    truth = glm_truth(model, groups, detached=True)
    assert_equals_oracle(run_layout(layout, model, truth, groups, detached=True), truth)


def test_recompute_changes_no_bit(model):
    groups = make_groups((70, [20, 1, 33]))
    truth = glm_truth(model, groups)
    errors = [
        run_layout(Layout(segment_length=16, recompute=recompute), model, truth, groups)[0].errors
        for recompute in ("none", "full", "selective")
    ]
    assert errors[0] == errors[1] == errors[2]


def test_masked_tokens_in_the_middle_and_a_branch_without_loss_tokens(model):
    groups = make_groups((90, [12, 5, 9]))
    groups[0]["masks"] = [[1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0], [0] * 5, [1] * 9]
    truth = glm_truth(model, groups)
    assert_equals_oracle(run_layout(Layout(branches_per_microbatch=2), model, truth, groups), truth)


def test_equal_rewards_give_no_gradient(model):
    groups = make_groups((90, [12, 5, 9]))
    groups[0]["advantages"] = [1.0, 1.0, 1.0]
    like = glm_truth(model, groups)
    size = sum(float(grad.square().sum()) for grad in like.grads.values() if grad is not None) ** 0.5
    groups[0]["advantages"] = [0.0, 0.0, 0.0]
    truth = glm_truth(model, groups)
    (result,) = run_layout(Layout(), model, truth, groups)
    assert sum(error for error, _ in result.errors.values()) ** 0.5 <= 1e-6 * size


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("frozen", [("embedding",), ("router", "layernorm"), ("self_attention",)])
def test_frozen_parameters_change_nothing_for_the_others(model, recompute, frozen):
    groups = make_groups((90, [12, 5]))
    truth = glm_truth(model, groups)
    results = run_layout(Layout(recompute=recompute, frozen=frozen), model, truth, groups)
    assert results[0].errors and not any(part in name for part in frozen for name in results[0].errors)
    assert_equals_oracle(results, truth)


def test_detached_misses_the_exact_bounds_by_thousands(model):
    """The check of the check: the part of the gradient that flows through the prompt is large."""
    groups = make_groups((70, [20, 1, 33]))
    truth = glm_truth(model, groups)
    (result,) = run_layout(Layout(segment_length=32), model, truth, groups, detached=True)
    error = sum(e for e, _ in result.errors.values()) ** 0.5
    assert error > 1e4 * 1e-5 * sum(n for _, n in result.errors.values()) ** 0.5


def test_ties_of_four_index_heads_are_noticed():
    """The check of the check: plain top-k selects other tokens, and logprobs differ by far more than the bound."""
    model = make_model(glm_config(index_n_heads=4))
    groups = make_groups((70, [20, 1, 33]))
    plain, stable = dense_grpo(model, groups).logprobs, glm_truth(model, groups).logprobs
    assert max((plain[key] - stable[key]).abs().max() for key in plain) > 1e-4
