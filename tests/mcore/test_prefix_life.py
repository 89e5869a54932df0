"""How long a prompt's state lives: as long as the plan says that its group does, walked back or not."""

import pytest
from harness import Layout, build_learner, fill_from_hf, make_groups, prompt_groups
from oracle import make_model, qwen_config

from longstraw_megatron.testing import run_ranks

NUM_GROUPS = 3


def _held(rank, world_size, layout, hf, weights, raw, scored):
    """The most groups that held prefix state of a chunk behind an action, and bytes held behind the last one."""
    learner, context = build_learner(layout, hf, detached=True)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    most, last = 0, -1

    def watch(action):
        nonlocal most, last
        for chunk in range(len(learner.chunks)):
            sizes = [sum(work.states[chunk].nbytes().values()) for work in learner.engine._works]
            most = max(most, sum(size > 0 for size in sizes))
        last = sum(learner.engine.state_bytes().values())

    learner.engine.progress = watch
    groups = prompt_groups(raw)
    (learner.score if scored else learner.compute_gradients)(groups)
    return most, last


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(segment_length=16),
        Layout(segment_length=16, max_live_prefixes=2),
        Layout(pp=2, vpp=2, segment_length=16, response_block=4, stages=(1, 1, 1, 1)),
    ],
    ids=["one", "two prefixes", "virtual stages and blocks"],
)
def test_a_prompt_that_is_not_walked_back_is_dropped_behind_its_last_branch(layout, scored):
    model = make_model(qwen_config(num_hidden_layers=4))
    hf = model.config.to_dict() | {"architectures": [type(model).__name__]}
    raw = make_groups(*[(40, [6, 9])] * NUM_GROUPS)
    for most, last in run_ranks(
        layout.world_size, _held, layout, hf, dict(model.state_dict()), raw, scored, timeout=200
    ):
        assert 1 <= most <= layout.max_live_prefixes
        assert last == 0


def test_a_kept_prompt_is_not():
    model = make_model(qwen_config(num_hidden_layers=4))
    hf = model.config.to_dict() | {"architectures": [type(model).__name__]}
    raw = make_groups(*[(40, [6, 9])] * NUM_GROUPS)
    layout = Layout(segment_length=16, reuse_steps=1)
    ((most, last),) = run_ranks(1, _held, layout, hf, dict(model.state_dict()), raw, False)
    assert most == NUM_GROUPS and last > 0
