"""Seconds against counts that others make: token-forwards of a group, attended pairs, bytes of the transfers."""

import pytest
from measured import layout_of

from longstraw_megatron.bench.workload import token_forwards
from longstraw_megatron.plan.memory import plan_memory
from longstraw_megatron.plan.parameters import layer_parameters
from longstraw_megatron.plan.time import plan_time

WORDS = ["prompt_length=4097", "segment_length=1024", "response_length=64", "group_size=4"]


def _plan(*words: str):
    layout = layout_of([*WORDS, *words])
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
