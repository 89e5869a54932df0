"""The checker: mutated plans are refused, for the right reason; counts and times of small plans are known."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_judge import is_legal
from plan_strategies import SMALL_DESCRIPTIONS

from longstraw_megatron.schedule import (
    Action,
    Costs,
    Description,
    GroupShape,
    Op,
    PlanError,
    check_plan,
    make_plan,
    simulate,
)

TWO_STAGES = Description(groups=(GroupShape(2, 2),), pp_size=2)


def _accepts(plan, description):
    try:
        check_plan(plan, description)
    except PlanError:
        return False
    return True


@given(SMALL_DESCRIPTIONS, st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_dropped_or_doubled_actions_are_refused(description, data):
    plan = make_plan(description)
    places = [(pp_rank, i) for pp_rank, actions in enumerate(plan) for i in range(len(actions))]
    if not places:
        return
    pp_rank, index = data.draw(st.sampled_from(places))
    dropped = [list(actions) for actions in plan]
    action = dropped[pp_rank].pop(index)
    assert not _accepts(dropped, description)
    doubled = [list(actions) for actions in plan]
    doubled[pp_rank].insert(data.draw(st.integers(0, len(doubled[pp_rank]))), action)
    assert not _accepts(doubled, description)


@given(SMALL_DESCRIPTIONS, st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_swapped_actions_are_judged_as_by_a_second_opinion(description, data):
    """Some swaps are harmless (a send and the next receive): the checker must refuse exactly the others."""
    plan = make_plan(description)
    places = [(pp_rank, i) for pp_rank, actions in enumerate(plan) for i in range(len(actions) - 1)]
    if not places:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        pp_rank, index = data.draw(st.sampled_from(places))
        distance = data.draw(st.integers(1, min(4, len(plan[pp_rank]) - 1 - index)))
        actions = plan[pp_rank]
        actions[index], actions[index + distance] = actions[index + distance], actions[index]
    assert _accepts(plan, description) == is_legal(plan, description)


@given(SMALL_DESCRIPTIONS, st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_an_action_on_another_rank_is_refused(description, data):
    plan = make_plan(description)
    places = [(pp_rank, i) for pp_rank, actions in enumerate(plan) for i in range(len(actions))]
    if description.pp_size == 1 or not places:
        return
    pp_rank, index = data.draw(st.sampled_from(places))
    plan[(pp_rank + 1) % description.pp_size].append(plan[pp_rank].pop(index))
    assert not _accepts(plan, description)


def _moved(plan, pp_rank, name, to):
    """The plan with the action of this name moved before the one named `to`."""
    actions = [list(actions) for actions in plan]
    names = [str(action) for action in actions[pp_rank]]
    action = actions[pp_rank].pop(names.index(name))
    names.remove(name)
    actions[pp_rank].insert(names.index(to), action)
    return actions


@pytest.mark.parametrize(
    ("pp_rank", "name", "to", "reason"),
    [
        (0, "F0.0@0", "P0.1@0", "Rank 0 does F0.0@0 before the last PREFILL of its group."),
        (0, "P0.1@0", "P0.0@0", "Rank 0 does P0.1@0 where unit 0 is next."),
        (1, "B0.0@1", "F0.0@1", "Rank 1 does B0.0@1 before its FORWARD."),
        (1, "W0.1@1", "B0.1@1", "Rank 1 does W0.1@1 before the last BACKWARD of its group."),
        (1, "W0.0@1", "W0.1@1", "Rank 1 does W0.0@1 where unit 1 is next."),
        (1, "F0.0@1", "rf:F0.0@1", "Rank 1 does F0.0@1 before rf:F0.0@1."),
        (0, "sf:F0.0@0", "F0.0@0", "Rank 0 does sf:F0.0@0 before the action that makes the tensor."),
        (
            0,
            "sf:F0.0@0",
            "rb:B0.0@0",
            "Transfer 2 from rank 0 to rank 1 is sent for F0.1@1 and received for F0.0@1.",
        ),
        (0, "rb:B0.0@0", "sf:F0.0@0", "The plan deadlocks: rank 0 at rb:B0.0@0, rank 1 at rf:F0.0@1."),
    ],
)
def test_reasons(pp_rank, name, to, reason):
    with pytest.raises(PlanError) as error:
        check_plan(_moved(make_plan(TWO_STAGES), pp_rank, name, to), TWO_STAGES)
    assert str(error.value) == reason


@pytest.mark.parametrize(
    ("name", "to", "reason"),
    [
        ("p0.0@0", "P0.0@0", "Rank 0 does p0.0@0 before the last PREFILL of its group."),
        ("p0.2@0", "F0.0@0", "Rank 0 does p0.2@0 before the FORWARD of the microbatch before its own."),
        ("F0.0@0", "p0.1@0", "Rank 0 does F0.0@0 before the last BLOCK_PREFILL of its microbatch."),
        ("w0.1@0", "B0.0@0", "Rank 0 does w0.1@0 before the BACKWARD of its microbatch."),
        ("w0.0@0", "w0.1@0", "Rank 0 does w0.0@0 where unit 1 is next."),
        ("W0.0@0", "w0.2@0", "Rank 0 does W0.0@0 before the last BLOCK_BACKWARD of its group."),
    ],
)
def test_reasons_of_blocks(name, to, reason):
    description = Description(groups=(GroupShape(1, 2, blocks=(2, 1)),))
    with pytest.raises(PlanError) as error:
        check_plan(_moved(make_plan(description), 0, name, to), description)
    assert str(error.value) == reason


def test_a_branch_lives_from_its_first_block_to_its_walk():
    description = Description(groups=(GroupShape(1, 2, blocks=(1, 1)),))
    plan = _moved(make_plan(description), 0, "p0.1@0", "w0.0@0")
    with pytest.raises(PlanError, match=r"^Rank 0 does p0\.1@0 while 1 branch graphs live, which is the limit\.$"):
        check_plan(plan, description)


def test_reasons_of_counts():
    plan = make_plan(TWO_STAGES)
    with pytest.raises(PlanError, match=r"^Rank 1 does .*0\.1@1 0 times, wanted once\.$"):
        check_plan([plan[0], [a for a in plan[1] if a.unit == 0]], TWO_STAGES)
    with pytest.raises(PlanError, match=r"^Rank 0 does P0\.0@0 2 times, wanted once\.$"):
        check_plan([[plan[0][0], *plan[0]], plan[1]], TWO_STAGES)
    with pytest.raises(PlanError, match=r"^Rank 0 does P1\.0@0, which is none of its actions\.$"):
        check_plan([[Action(Op.PREFILL, 1, 0, 0), *plan[0]], plan[1]], TWO_STAGES)
    with pytest.raises(PlanError, match=r"^A plan has one list for each of 2 pipeline ranks, got 1\.$"):
        check_plan(plan[:1], TWO_STAGES)


def test_memory_limits_are_refused():
    group = GroupShape(1, 3)
    one_stage = Description(groups=(group, group), exact=False)
    (actions,) = make_plan(one_stage)
    by_kind = sorted(actions[:7], key=lambda action: "PFB".index(action.op.value))
    with pytest.raises(PlanError, match=r"^Rank 0 does F0\.1@0 while 1 branch graphs live, which is the limit\.$"):
        check_plan([[*by_kind, *actions[7:]]], one_stage)
    next_first = [actions[0], actions[7], *actions[1:7], *actions[8:]]
    with pytest.raises(
        PlanError, match=r"^Rank 0 does P1\.0@0 while 1 groups live on its stage, which is the limit\.$"
    ):
        check_plan([next_first], one_stage)
    assert check_plan([next_first], replace(one_stage, max_live_prefixes=2)).peak_live_prefixes == (2,)


def test_report_of_a_small_plan():
    costs = Costs(prefill=1, forward=2, backward=3, prompt_backward=4)
    report = check_plan(make_plan(TWO_STAGES), TWO_STAGES, costs)
    # rank 1: waits for P0, 2 P, waits for the rest of F0, 2 (F B), 2 W; then rank 0's last W
    assert report.makespan == 1 + 2 + 1 + 10 + 8 + 4
    assert report.busy == (20, 20)
    assert report.bubble_fraction == pytest.approx(1 - 40 / 52)
    assert report.peak_live_graphs == (2, 1)
    assert report.peak_kept_inputs == (2, 2)
    assert report.peak_live_prefixes == (1, 1)
    assert report.peak_held_inputs == (1, 1)
    # 1F1B's second forward is on its way while the first gradient comes back: one send has to be pending
    assert report.min_pending_sends == 1
    assert sorted(simulate(make_plan(TWO_STAGES), costs, max_pending=0).stuck) == [0, 1]


def test_a_pipeline_in_one_direction_needs_no_buffer():
    scoring = replace(TWO_STAGES, forward_only=True)
    assert check_plan(make_plan(scoring), scoring).min_pending_sends == 0


def test_latency_adds_up_along_the_pipeline():
    scoring = Description(groups=(GroupShape(0, 2),), pp_size=3, forward_only=True)
    plan = make_plan(scoring)
    assert check_plan(plan, scoring).makespan == 4
    assert check_plan(plan, scoring, latency=0.5).makespan == 5


def test_costs_by_stage_and_by_any_callable():
    description = Description(groups=(GroupShape(1, 1),), pp_size=2)
    plan = make_plan(description)
    assert check_plan(plan, description, Costs(stages=(1, 2))).busy == (7, 14)
    report = check_plan(plan, description, lambda action: 5.0 if action.op is Op.PREFILL else 0.0)
    assert (report.makespan, report.busy) == (10, (5, 5))


def test_nothing_to_do():
    empty = Description(groups=(), pp_size=2)
    report = check_plan(make_plan(empty), empty)
    assert make_plan(empty) == [[], []]
    assert (report.makespan, report.bubble_fraction) == (0, 0)
