"""The Qwen hybrid on one process: every parameter's gradient against Hugging Face's, in every awkward shape."""

import pytest
from harness import Layout, assert_equals_oracle, make_groups, run_layout
from oracle import dense_grpo, make_model, qwen_config

SHAPES = {
    "prompt not a multiple of the segment": (Layout(), [(150, [20, 1, 33])]),
    "prefix a multiple of segment and chunk": (Layout(), [(129, [20, 7, 33])]),
    "last segment of one token": (Layout(), [(130, [5, 70, 1])]),
    "prompt of one token": (Layout(), [(1, [9, 1, 20])]),
    "prompt of two tokens": (Layout(), [(2, [9, 1, 20])]),
    "segment of one token": (Layout(segment_length=1, page_length=2), [(4, [9, 1])]),
    "segment shorter than the convolution": (Layout(segment_length=2), [(24, [9, 1, 20])]),
    "segment longer than the prompt": (Layout(segment_length=1000), [(40, [9, 20])]),
    "one branch of one token": (Layout(segment_length=100), [(200, [1])]),
    "full recompute": (Layout(recompute="full"), [(150, [20, 1, 33])]),
    "selective recompute": (Layout(recompute="selective"), [(150, [20, 1, 33])]),
    "branches packed": (Layout(branches_per_microbatch=3), [(150, [20, 1, 33])]),
    "branches packed, one left over, recompute": (
        Layout(branches_per_microbatch=2, recompute="full"),
        [(70, [20, 1, 33])],
    ),
    "branches of very different length packed": (Layout(branches_per_microbatch=4), [(70, [1, 90, 2, 3])]),
    "several groups of different shape": (
        Layout(branches_per_microbatch=2, segment_length=32),
        [(90, [4, 11]), (1, [5]), (37, [8, 1, 3])],
    ),
}


@pytest.fixture(scope="module")
def model():
    return make_model(qwen_config())


@pytest.mark.parametrize("name", SHAPES)
def test_exact_gradient_is_that_of_full_sequences(model, name):
    layout, shapes = SHAPES[name]
    groups = make_groups(*shapes)
    truth = dense_grpo(model, groups)
    assert_equals_oracle(run_layout(layout, model, truth, groups), truth)


@pytest.mark.parametrize("name", ["prompt not a multiple of the segment", "prompt of one token", "branches packed"])
def test_detached_gradient_is_that_of_a_detached_cache(model, name):
    layout, shapes = SHAPES[name]
    groups = make_groups(*shapes)
    truth = dense_grpo(model, groups, detached=True)
    assert_equals_oracle(run_layout(layout, model, truth, groups, detached=True), truth)


def test_masked_tokens_in_the_middle_and_a_branch_without_loss_tokens(model):
    groups = make_groups((90, [12, 5, 9]))
    groups[0]["masks"] = [[1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0], [0] * 5, [1] * 9]
    truth = dense_grpo(model, groups)
    layout = Layout(branches_per_microbatch=2)
    assert_equals_oracle(run_layout(layout, model, truth, groups), truth)


def test_equal_rewards_give_no_gradient(model):
    groups = make_groups((90, [12, 5, 9]))
    groups[0]["advantages"] = [1.0, 1.0, 1.0]
    like = dense_grpo(model, groups)
    size = sum(float(grad.square().sum()) for grad in like.grads.values()) ** 0.5
    groups[0]["advantages"] = [0.0, 0.0, 0.0]
    truth = dense_grpo(model, groups)
    (result,) = run_layout(Layout(), model, truth, groups)
    ours = sum(error for error, _ in result.errors.values()) ** 0.5
    assert ours <= 1e-6 * size


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("frozen", [("embedding",), ("output_layer", "layernorm"), ("linear_qkv", "in_proj", "mlp")])
def test_frozen_parameters_change_nothing_for_the_others(model, recompute, frozen):
    groups = make_groups((90, [12, 5]))
    truth = dense_grpo(model, groups)
    results = run_layout(Layout(recompute=recompute, frozen=frozen), model, truth, groups)
    trained = {name for name in results[0].errors if not any(part in name for part in frozen)}
    assert trained == set(results[0].errors) and trained
    assert_equals_oracle(results, truth)


def test_detached_misses_the_exact_bounds_by_thousands(model):
    """The check of the check: the part of the gradient that flows through the prompt is large."""
    groups = make_groups((150, [20, 1, 33]))
    truth = dense_grpo(model, groups)
    (result,) = run_layout(Layout(), model, truth, groups, detached=True)
    error = sum(e for e, _ in result.errors.values()) ** 0.5
    norm = sum(n for _, n in result.errors.values()) ** 0.5
    assert error > 1e4 * 1e-5 * norm
