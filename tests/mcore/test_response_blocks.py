"""Long responses in blocks: the gradient is that of whole responses, whatever the block, model, mode and layout."""

import pytest
from glm_oracle import glm_truth
from harness import Layout, assert_equals_oracle, make_groups, names_of, run_layout
from oracle import dense_grpo, glm_config, make_model, qwen_config

from longstraw_megatron.batch import split_microbatches

GROUPS = (150, [20, 1, 33])
QWEN = {
    "block of one token": (Layout(response_block=1), [(40, [5, 1, 3])]),
    "block shorter than the convolution": (Layout(response_block=2), [(40, [9, 4])]),
    "block that does not divide": (Layout(response_block=7), [GROUPS]),
    "block that divides": (Layout(response_block=11), [(150, [22, 11, 33])]),
    "block as long as the response": (Layout(response_block=33), [GROUPS]),
    "block longer than the response": (Layout(response_block=99), [GROUPS]),
    "prompt of one token": (Layout(response_block=4), [(1, [9, 1, 20])]),
    "prompt of two tokens": (Layout(response_block=4), [(2, [9, 20])]),
    "full recompute": (Layout(response_block=8, recompute="full"), [GROUPS]),
    "selective recompute": (Layout(response_block=8, recompute="selective"), [GROUPS]),
    "short branches packed, long ones alone": (
        Layout(response_block=8, branches_per_microbatch=2),
        [(70, [20, 1, 8, 3, 17, 2])],
    ),
    "several groups of different shape": (
        Layout(response_block=5, segment_length=32),
        [(90, [4, 11]), (1, [6]), (37, [8, 1, 3])],
    ),
}
GLM = {
    "block of one token": (Layout(response_block=1), [(24, [5, 3])]),
    "block that does not divide": (Layout(segment_length=16, response_block=7), [(65, [20, 1, 33])]),
    "block as long as the selection": (Layout(segment_length=32, response_block=16), [(70, [40, 20])]),
    "prompt of one token": (Layout(response_block=4), [(1, [9, 1, 20])]),
    "full recompute": (Layout(segment_length=16, response_block=7, recompute="full"), [(65, [20, 33])]),
    "short branches packed, long ones alone": (
        Layout(segment_length=16, response_block=8, branches_per_microbatch=2),
        [(40, [20, 1, 8, 3])],
    ),
}


@pytest.fixture(scope="module")
def qwen():
    return make_model(qwen_config(num_hidden_layers=4))


@pytest.fixture(scope="module")
def glm():
    return make_model(glm_config(index_n_heads=4, num_hidden_layers=7))


def _check(model, layout, shapes, *, detached=False, masks=None):
    groups = make_groups(*shapes)
    if masks is not None:
        groups[0]["masks"] = masks
    truth = (glm_truth if model.config.model_type.startswith("glm") else dense_grpo)(model, groups, detached=detached)
    assert_equals_oracle(run_layout(layout, model, truth, groups, detached=detached), truth)


@pytest.mark.parametrize("name", QWEN)
def test_qwen(qwen, name):
    _check(qwen, *QWEN[name])


@pytest.mark.parametrize("name", ["block shorter than the convolution", "block that does not divide"])
def test_qwen_detached_prompt(qwen, name):
    _check(qwen, *QWEN[name], detached=True)


@pytest.mark.parametrize("name", GLM)
def test_glm(glm, name):
    _check(glm, *GLM[name])


@pytest.mark.parametrize("name", ["block that does not divide", "prompt of one token"])
def test_glm_detached_prompt(glm, name):
    _check(glm, *GLM[name], detached=True)


@pytest.mark.parametrize("detached", [False, True])
def test_masked_tokens_and_a_branch_without_loss_tokens(qwen, detached):
    masks = [[1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 0], [0] * 5, [1] * 9]
    _check(qwen, Layout(response_block=4), [(90, [12, 5, 9])], detached=detached, masks=masks)


QWEN_LAYOUTS = {
    "tp2 sp": Layout(tp=2, response_block=6),
    "cp2": Layout(cp=2, response_block=6),
    "cp3 relayed": Layout(cp=3, response_block=4),
    "pp2": Layout(pp=2, response_block=6),
    "pp3, recompute": Layout(pp=3, response_block=6, recompute="full"),
    "pp2 vpp2": Layout(pp=2, vpp=2, response_block=6),
    "pp2 cp2": Layout(pp=2, cp=2, response_block=6),
    "pp2, two prefixes": Layout(pp=2, response_block=6, max_live_prefixes=2),
}
GLM_LAYOUTS = {
    "cp2": Layout(cp=2, segment_length=16, response_block=5),
    "cp3 packed": Layout(cp=3, segment_length=16, response_block=5, branches_per_microbatch=2),
    "tp2 sp": Layout(tp=2, segment_length=16, response_block=5),
    "ep2 in lockstep, packed": Layout(dp=2, ep=2, segment_length=16, response_block=5, branches_per_microbatch=2),
    "ep4, a rank without a group": Layout(dp=4, ep=4, segment_length=32, response_block=5, recompute="full"),
    "pp2 vpp2": Layout(pp=2, vpp=2, segment_length=16, stages=(1, 1, 4, 1), response_block=5),
    "pp2 cp2 ep2": Layout(pp=2, cp=2, ep=2, segment_length=16, stages=(6, 1), response_block=5),
}


@pytest.mark.parametrize("name", names_of(QWEN_LAYOUTS, wide=set(QWEN_LAYOUTS) - {"cp2", "pp2 vpp2"}))
def test_qwen_in_parallel(qwen, name):
    _check(qwen, QWEN_LAYOUTS[name], [(90, [4, 15]), (1, [7]), (37, [12, 1, 3])])


@pytest.mark.parametrize("name", names_of(["cp2", "cp3 relayed", "pp2"], wide=["cp3 relayed", "pp2"]))
def test_qwen_in_parallel_detached(qwen, name):
    _check(qwen, QWEN_LAYOUTS[name], [(90, [4, 15]), (1, [7]), (37, [12, 1, 3])], detached=True)


@pytest.mark.parametrize(
    "name", names_of(GLM_LAYOUTS, wide=set(GLM_LAYOUTS) - {"ep2 in lockstep, packed", "pp2 cp2 ep2"})
)
def test_glm_in_parallel(glm, name):
    _check(glm, GLM_LAYOUTS[name], [(60, [12, 1, 17]), (1, [5]), (37, [8, 3])])


@pytest.mark.parametrize("name", names_of(["cp2", "ep2 in lockstep, packed"], wide=["cp2"]))
def test_glm_in_parallel_detached(glm, name):
    _check(glm, GLM_LAYOUTS[name], [(60, [12, 1, 17]), (1, [5]), (37, [8, 3])], detached=True)


def test_branches_longer_than_a_block_are_alone():
    from harness import prompt_groups

    (group,) = prompt_groups(make_groups((4, [3, 9, 2, 8, 1, 5])))
    assert split_microbatches(group, 2, 8) == [[0, 2], [1], [3, 4], [5]]
    assert split_microbatches(group, 2) == [[0, 1], [2, 3], [4, 5]]
