"""Seconds against counts that others make: token-forwards of a group, attended pairs, bytes of the transfers."""

import dataclasses

import pytest
from measured import layout_of

from longstraw_megatron.bench.workload import token_forwards
from longstraw_megatron.plan.memory import plan_memory
from longstraw_megatron.plan.parameters import count_parameters, layer_parameters
from longstraw_megatron.plan.time import plan_time

WORDS = ["prompt_length=4097", "segment_length=1024", "response_length=64", "group_size=4"]


def _plan(*words: str, device: str = "cpu"):
    layout = layout_of([*WORDS, *words])
    layout = dataclasses.replace(layout, config=dataclasses.replace(layout.config, device=device))
    return layout, plan_time(layout, plan_memory(layout))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("gradient", ["exact", "detached"])
def test_matrix_products_are_token_forwards(gradient, recompute):
    layout, time = _plan(f"gradient={gradient}", f"recompute={recompute}")
    config = layout.config
    parameters = sum(
        layer_parameters(layout.hf, i, config.parallel).dense for i in range(layout.hf["num_hidden_layers"])
    )
    rate = config.hardware.matmul_flops.fp32 * config.hardware.efficiency.matmul
    assert time.work["matmul"] == pytest.approx(2 * parameters * token_forwards(config, gradient) / rate, rel=1e-6)


def test_attention_is_pairs():
    layout, time = _plan("gradient=detached", "response_length=1", "group_size=1")
    hf, hardware = layout.hf, layout.config.hardware
    prefix = layout.workload.prefix_length
    # the prompt forward; one response token forward and backward over all of it
    pairs = prefix * (prefix + 1) / 2 + 3.5 * (prefix + 1)
    num_layers = sum(kind == ("softmax", "dense") for kind in layout.kinds)
    flops = 4 * hf["num_attention_heads"] * hf["head_dim"] * pairs * num_layers
    seconds = flops / (hardware.matmul_flops.fp32 * hardware.efficiency.attention)
    assert time.work["attention"] == pytest.approx(seconds, rel=1e-9)


def test_a_pipeline_halves_the_work_and_adds_a_bubble():
    _, alone = _plan()
    _, two = _plan("parallel.pp=2")
    work = sum(seconds for name, seconds in two.work.items() if name not in ("stages", "head"))
    whole = sum(seconds for name, seconds in alone.work.items() if name != "head")
    assert work == pytest.approx(whole / 2, rel=1e-6)
    assert alone.bubble_fraction == pytest.approx(0, abs=1e-9) and 0 < two.bubble_fraction < 0.5
    assert two.makespan < alone.makespan


def test_blocks_cost_one_forward_more():
    _, whole = _plan("response_length=512", "gradient=detached")
    _, blocks = _plan("response_length=512", "gradient=detached", "response_block=128")
    # a forward and a backward of two, and one more forward of three blocks in four
    ratio = (3 + 0.75) / 3
    prompt = 4096
    expected = (prompt + 4 * 512 * 3 * ratio) / (prompt + 4 * 512 * 3)
    assert blocks.work["matmul"] / whole.work["matmul"] == pytest.approx(expected, rel=1e-6)


SLOW, FAST = "hardware.host_bandwidth=1e4", "hardware.host_bandwidth=1e30"
ON_HOST = {
    "softmax_and_delta": ["model=tiny_qwen_hybrid", "state.location=host"],
    "softmax_over_cp": ["model=tiny_qwen_hybrid", "state.location=host", "parallel.cp=2"],
    "sparse": ["model=tiny_glm_dsa", "state.location=host"],
    "sparse_over_cp": ["model=tiny_glm_dsa", "state.location=host", "parallel.cp=2", "recompute=full"],
    "stage_inputs": ["model=tiny_qwen_hybrid", "state.stage_inputs=host", "parallel.pp=2"],
}


@pytest.mark.parametrize("name", ON_HOST)
def test_host_memory_takes_time_where_its_link_is_slow(name):
    words = ON_HOST[name]
    _, on_device = _plan(*(word for word in words if not word.endswith("=host")))
    _, slow = _plan(*words, SLOW)
    _, fast = _plan(*words, FAST)
    assert slow.makespan > 2 * on_device.makespan
    assert fast.step == pytest.approx(on_device.step, rel=1e-9)


def test_pages_come_and_go_as_often_as_they_are_read():
    layout, time = _plan("state.location=host", SLOW)
    config, hf, workload = layout.config, layout.hf, layout.workload
    prefix, branches = workload.prefix_length, len(workload.response_lengths)
    before = sum(range(0, prefix, config.segment_length))
    # values: every segment in prefill, forward and backward of its walk, the responses forward and backward; with the
    # backwards, sums of gradients come and go
    read = 3 * before + 2 * branches * prefix
    summed = 2 * (before + branches * prefix)
    # once: values that prefill stores and gradients that the walk takes up
    elements = 2 * hf["num_key_value_heads"] * hf["head_dim"] * (read + summed + 2 * prefix)
    num_layers = sum(kind == ("softmax", "dense") for kind in layout.kinds)
    rate = config.hardware.host_bandwidth * config.hardware.efficiency.host
    assert time.work["attention"] == pytest.approx(num_layers * elements * 4 / rate, rel=1e-9)


def test_stage_inputs_go_out_once_and_come_back_once():
    layout, time = _plan("state.stage_inputs=host", "parallel.pp=2", SLOW)
    hardware = layout.config.hardware
    moved = 2 * layout.workload.prefix_length * layout.hf["hidden_size"] * 4
    rate = hardware.host_bandwidth * hardware.efficiency.host
    assert time.work["stage inputs"] == pytest.approx(moved / rate, rel=1e-9)


@pytest.mark.parametrize(("words", "expert_dp"), [(["parallel.ep=2"], 1), (["parallel.ep=1"], 2)])
def test_experts_are_reduced_over_their_own_ranks(words, expert_dp):
    layout, time = _plan("model=tiny_glm_dsa", "parallel.cp=2", *words)
    assert layout.expert_dp == expert_dp
    config = layout.config
    held = count_parameters(config.model.hf_config, config.parallel, 0)
    # float32 gradients out, float32 weights back
    moved = 8 * (held.trained_dense / 2 + held.trained_expert * (expert_dp - 1) / expert_dp)
    rate = config.hardware.link_bandwidth * config.hardware.efficiency.link
    assert held.trained_expert and time.reduce == pytest.approx(moved / rate, rel=1e-9)


@pytest.mark.parametrize(("grad", "size"), [("true", 4), ("false", 2)])
def test_an_offloaded_optimizer_moves_gradients_and_weights(grad, size):
    words = ["hardware=h100", "precision=bf16", f"optimizer.grad_reduce_in_fp32={grad}"]
    words += ["optimizer.optimizer_cpu_offload=true"]
    layout, time = _plan(*words, "optimizer.optimizer_offload_fraction=1.0", device="cuda")
    hardware = layout.config.hardware
    trained = count_parameters(layout.config.model.hf_config, layout.config.parallel, 0).trained
    rate = hardware.host_bandwidth * hardware.efficiency.host
    assert time.optimizer == pytest.approx(trained * (size + 2) / rate, rel=1e-9)
