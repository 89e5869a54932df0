"""Blocks bound the memory of a long response: one block's graph, and the branch's own state."""

import torch
from harness import Layout, build_learner, fill_from_hf, make_groups, prompt_groups
from oracle import make_model, qwen_config

from longstraw_megatron.testing import run_ranks
from longstraw_megatron.testing.memory import peak_memory

BLOCK = 32


def _peaks(rank, world_size, hf, weights):
    """{(block, response length): (peak bytes of a step, most bytes of state)}."""
    peaks = {}
    for block in (None, BLOCK):
        learner, context = build_learner(Layout(response_block=block, segment_length=32), hf, detached=False)
        fill_from_hf(learner.chunks, hf, weights, context.groups)
        state: list[int] = []
        learner.engine.progress = lambda action, learner=learner, state=state: state.append(
            sum(learner.engine.state_bytes().values())
        )
        learner.compute_gradients(prompt_groups(make_groups((40, [8]))))  # what is made once
        for length in (8 * BLOCK, 16 * BLOCK):
            groups = prompt_groups(make_groups((40, [length])))
            state.clear()
            with peak_memory() as recorder:
                learner.compute_gradients(groups)
            peaks[block, length] = recorder.peak, max(state)
    return peaks


def test_peak_is_one_blocks_graph_and_the_branchs_state():
    model = make_model(qwen_config(num_hidden_layers=4))
    hf = model.config.to_dict() | {"architectures": [type(model).__name__]}
    torch.manual_seed(0)
    (peaks,) = run_ranks(1, _peaks, hf, dict(model.state_dict()), timeout=400)
    short, long = 8 * BLOCK, 16 * BLOCK
    graph = peaks[None, long][0] - peaks[None, short][0]  # of `short` more tokens
    growth, state = (peaks[BLOCK, long][i] - peaks[BLOCK, short][i] for i in (0, 1))
    # per token, besides: logprobs and their gradients; positions and targets are those of one block
    assert 0 < growth <= 1.2 * state + 64 * short
    assert growth < 0.2 * graph
    assert peaks[BLOCK, long][0] < 0.3 * peaks[None, long][0]
