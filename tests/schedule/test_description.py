"""Descriptions: limits, Megatron's placement of stages, and lockstep padding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_strategies import SHAPES

from longstraw_megatron.schedule import Action, Description, GroupShape, Op, equalize, make_plan


def test_virtual_stages_lie_as_in_megatron():
    description = Description(groups=(), pp_size=4, vpp_size=3)
    assert [list(description.stages_of(pp_rank)) for pp_rank in range(4)] == [
        [0, 4, 8],
        [1, 5, 9],
        [2, 6, 10],
        [3, 7, 11],
    ]


def test_limits_of_live_graphs():
    plain = Description(groups=(), pp_size=4)
    assert [plain.max_live_graphs(stage) for stage in range(4)] == [4, 3, 2, 1]
    virtual = Description(groups=(), pp_size=4, vpp_size=2)
    assert [virtual.max_live_graphs(stage) for stage in range(8)] == [9, 8, 7, 6, 5, 4, 3, 1]
    # Megatron's interleaved schedule holds (vpp - 1) pp + 2 (pp - pp_rank) - 1
    assert [sum(map(virtual.max_live_graphs, virtual.stages_of(r))) for r in range(4)] == [14, 12, 10, 7]
    assert [4 + 2 * (4 - pp_rank) - 1 for pp_rank in range(4)] == [11, 9, 7, 5]


@pytest.mark.parametrize("name", ["pp_size", "vpp_size", "max_live_prefixes", "max_run_ahead"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name} is at least 1, got 0"):
        Description(groups=(), **{name: 0})


@pytest.mark.parametrize("counts", [(-1, 0), (0, -1), (2, 2, 3), (2, 2, 0, 3), (2, 2, -1)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError, match="counts >= 0 and no more fillers than units"):
        GroupShape(*counts)


def test_equalize_pads_to_the_largest_of_each_place():
    first, second, none = [GroupShape(4, 2), GroupShape(1, 1)], [GroupShape(2, 8)], []
    assert equalize([first, second, none]) == [
        (GroupShape(4, 8, 0, 6), GroupShape(1, 1, 0, 0)),
        (GroupShape(4, 8, 2, 0), GroupShape(1, 1, 1, 1)),
        (GroupShape(4, 8, 4, 8), GroupShape(1, 1, 1, 1)),
    ]
    assert equalize([]) == []
    assert equalize([[], []]) == [(), ()]


def test_fillers_are_the_last_units():
    shape = GroupShape(4, 8, 2, 6)
    for op, num, real in ((Op.PREFILL, 4, 2), (Op.PROMPT_BACKWARD, 4, 2), (Op.FORWARD, 8, 2), (Op.BACKWARD, 8, 2)):
        assert [shape.is_filler(Action(op, 0, unit, 0)) for unit in range(num)] == [unit >= real for unit in range(num)]


@given(st.lists(st.lists(SHAPES, max_size=4), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_equalized_ranks_run_the_same_plan(groups_per_rank):
    padded = equalize(groups_per_rank)
    plans = [make_plan(Description(groups=groups, pp_size=2)) for groups in padded]
    assert all(plan == plans[0] for plan in plans)
    for groups, original in zip(padded, groups_per_rank, strict=True):
        real = [
            (g.num_segments - g.num_filler_segments, g.num_microbatches - g.num_filler_microbatches) for g in groups
        ]
        assert real[: len(original)] == [(g.num_segments, g.num_microbatches) for g in original]
        assert all(counts == (0, 0) for counts in real[len(original) :])
    assert equalize(padded) == padded
