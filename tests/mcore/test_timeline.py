"""The engine does what its plan says, in the plan's order, and waits as long as the checker predicts.

Actions are paced by sleeps; what each really took goes to the checker as its cost, so that another process's load on
the machine is in the prediction too.
"""

import contextlib
import time

import pytest
import torch.distributed as dist
from harness import Layout, build_learner, fill_from_hf, make_groups, prompt_groups, recorded_actions
from oracle import make_model, qwen_config

from longstraw_megatron.mcore.monitor import Monitor
from longstraw_megatron.schedule import Costs, Description, GroupShape, check_plan
from longstraw_megatron.testing import run_ranks

UNIT_S = 0.2  # what a rank takes between two actions, some milliseconds, is in no prediction


class PacedMonitor(Monitor):
    """Every action takes the time that `seconds` has for its label, if its own work is done sooner."""

    seconds: dict[str, float]

    @contextlib.contextmanager
    def phase(self, name, *, tokens=0, label=""):
        with super().phase(name, tokens=tokens, label=label):
            end = time.perf_counter() + self.seconds.get(label, 0.0)
            yield
            time.sleep(max(0.0, end - time.perf_counter()))


@pytest.fixture(scope="module")
def hf_model():
    return make_model(qwen_config())


def _run(rank, world_size, layout, hf, weights, groups, unit_s, score):
    """(actions, [(label, start, stop)]) of this rank; all processes have one clock."""
    learner, context = build_learner(layout, hf, detached=False)
    fill_from_hf(learner.chunks, hf, weights, context.groups)
    monitor = PacedMonitor(context.device)
    learner.monitor = learner.engine.monitor = monitor
    executed = recorded_actions(learner)
    work = learner.score if score else learner.compute_gradients
    monitor.seconds = {}
    if unit_s:
        work(prompt_groups(groups))  # what only a first pass does
        monitor.seconds = {str(a): unit_s * Costs()(a) for a in executed if a.op.is_compute}
        monitor.take()
        dist.barrier()
    work(prompt_groups(groups))
    return executed, [span for span in monitor.timeline if span[0] != "reduce"]


def _execute(hf_model, layout, groups, *, unit_s=0.0, score=False):
    """The plan that the ranks ran together, and their timelines."""
    hf = hf_model.config.to_dict() | {"architectures": [type(hf_model).__name__]}
    weights = dict(hf_model.state_dict())
    results = run_ranks(layout.world_size, _run, layout, hf, weights, groups, unit_s, score)
    return [actions for actions, _ in results], [timeline for _, timeline in results]


@pytest.mark.parametrize(
    ("layout", "score"),
    [
        (Layout(segment_length=16), False),
        (Layout(pp=2, segment_length=16), False),
        (Layout(pp=2, vpp=2, segment_length=16), False),
        (Layout(pp=2, vpp=2, segment_length=16), True),
        (Layout(pp=2, max_live_prefixes=2, segment_length=16), False),
        (Layout(pp=4, segment_length=16), False),
    ],
    ids=["pp1", "pp2", "pp2_vpp2", "pp2_vpp2_scored", "pp2_two_live", "pp4"],
)
def test_actions_run_in_the_order_of_a_proven_plan(hf_model, layout, score):
    # prefixes of 44 and 12 tokens in segments of at most 16
    groups = make_groups((45, [4, 1, 9]), (13, [5, 3]))
    description = Description(
        groups=(GroupShape(3, 3), GroupShape(1, 2)),
        pp_size=layout.pp,
        vpp_size=layout.vpp,
        exact=not score,
        forward_only=score,
        max_live_prefixes=layout.max_live_prefixes,
    )
    plan, timelines = _execute(hf_model, layout, groups, score=score)
    check_plan(plan, description)
    for actions, timeline in zip(plan, timelines, strict=True):
        assert [label for label, _, _ in timeline] == [str(action) for action in actions if action.op.is_compute]
        ends = [0.0, *(stop for _, _, stop in timeline)]
        assert all(end <= start <= stop for end, (_, start, stop) in zip(ends, timeline, strict=False))


def _bubble(timelines):
    spans = [span for timeline in timelines for span in timeline]
    makespan = max(stop for _, _, stop in spans) - min(start for _, start, _ in spans)
    return 1 - sum(stop - start for _, start, stop in spans) / (len(timelines) * makespan)


@pytest.mark.parametrize(("pp", "num_segments", "num_branches"), [(2, 2, 2), (2, 3, 4), (4, 2, 2), (4, 3, 3)])
def test_waits_are_those_that_the_checker_predicts(hf_model, pp, num_segments, num_branches):
    description = Description(groups=(GroupShape(num_segments, num_branches),), pp_size=pp)
    groups = make_groups((12 * num_segments + 1, [3] * num_branches))
    plan, timelines = _execute(hf_model, Layout(pp=pp, segment_length=12), groups, unit_s=UNIT_S)
    took = {label: stop - start for timeline in timelines for label, start, stop in timeline}
    report = check_plan(plan, description, lambda action: took[str(action)])
    assert _bubble(timelines) == pytest.approx(report.bubble_fraction, rel=0.15)
    costs = {str(action): Costs()(action) for actions in plan for action in actions if action.op.is_compute}
    assert all(took[label] >= UNIT_S * cost for label, cost in costs.items())
