"""The layouts of 32 GPUs, as 32 gloo processes with tiny models of their own shape: `make test-32`."""

import pytest
from glm_oracle import glm_truth
from harness import Layout, assert_equals_oracle, make_groups, run_layout
from oracle import dense_grpo, glm_config, make_model, qwen_config

pytestmark = pytest.mark.ranks32

GLM = {
    "glm tp1 pp1 cp32 ep32": Layout(cp=32, ep=32, segment_length=64, branches_per_microbatch=2),
    "glm tp1 pp4 cp8 ep8": Layout(pp=4, cp=8, ep=8, segment_length=40, branches_per_microbatch=2),
    "glm tp2 sp pp4 cp4 ep8": Layout(tp=2, pp=4, cp=4, ep=8, segment_length=40, branches_per_microbatch=2),
}
QWEN = {
    "qwen tp2 cp4 pp4": Layout(tp=2, cp=4, pp=4, branches_per_microbatch=2),
    "qwen tp4 cp2 pp2 dp2": Layout(tp=4, cp=2, pp=2, dp=2, branches_per_microbatch=2, recompute="full"),
}


@pytest.mark.parametrize("name", GLM)
def test_glm(name):
    model = make_model(glm_config(n_routed_experts=32, index_n_heads=4))
    groups = make_groups((90, [9, 1, 12]), (37, [6]))
    truth = glm_truth(model, groups)
    assert_equals_oracle(run_layout(GLM[name], model, truth, groups), truth)


@pytest.mark.parametrize("name", QWEN)
def test_qwen(name):
    config = qwen_config(
        num_attention_heads=8,
        num_key_value_heads=4,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    model = make_model(config)
    groups = make_groups((150, [20, 1, 33]), (37, [5, 9]))
    truth = dense_grpo(model, groups)
    assert_equals_oracle(run_layout(QWEN[name], model, truth, groups), truth)
