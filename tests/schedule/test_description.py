"""Descriptions: limits, costs and Megatron's placement of stages."""

import pytest

from longstraw_megatron.schedule import Action, Costs, Description, GroupShape, Op, RowCosts, make_plan, step_costs
from longstraw_megatron.schedule.actions import COMPUTE_OPS


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


@pytest.mark.parametrize("counts", [(-1, 0), (0, -1)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError, match="counts of at least 0"):
        GroupShape(*counts)


def test_blocks_are_counted_over_the_group_and_walked_in_reverse():
    shape = GroupShape(1, 4, blocks=(2, 0, 3, 0))
    assert [shape.block_of(unit) for unit in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    assert shape.walk_order == (1, 0, 4, 3, 2)
    description = Description(groups=(shape, GroupShape(1, 4)))
    assert [description.num_units(op, 0) for op in COMPUTE_OPS] == [1, 5, 4, 4, 5, 1]
    assert [description.num_units(op, 1) for op in COMPUTE_OPS] == [1, 0, 4, 4, 0, 1]
    with pytest.raises(ValueError, match="for each microbatch, or for none"):
        GroupShape(1, 4, blocks=(1,))
    with pytest.raises(ValueError, match="counts of at least 0"):
        GroupShape(1, 1, blocks=(-1,))


def test_actions_cost_their_rows():
    costs = RowCosts(
        Costs(stages=(1.0, 4.0)), segment_rows=((8, 3), ()), microbatch_rows=((5,), (7, 2)), block_rows=((), (6, 9))
    )
    assert costs(Action(Op.BLOCK_PREFILL, 1, 1, 0)) == 9
    assert costs(Action(Op.BLOCK_BACKWARD, 1, 0, 1)) == 6 * 3 * 4
    assert costs(Action(Op.PREFILL, 0, 1, 0)) == 3
    assert costs(Action(Op.PROMPT_BACKWARD, 0, 0, 1)) == 8 * 3 * 4
    assert costs(Action(Op.FORWARD, 1, 0, 0)) == 7
    assert costs(Action(Op.BACKWARD, 1, 1, 1)) == 2 * 2 * 4


def test_a_step_costs_rows_times_layers_and_its_finer_cuts_as_much():
    rows = [[8, 6], [4]], [[6], [2, 2]], [[], [4]]
    costs = step_costs(*rows, stage_layers=[3, 0], recompute=True)
    # rows are halved: their ratios count
    assert costs(Action(Op.PREFILL, 0, 1, 0)) == 3 * 3
    assert costs(Action(Op.PROMPT_BACKWARD, 0, 0, 0)) == 4 * 4 * 3
    assert costs(Action(Op.BACKWARD, 1, 1, 1)) == 1 * 3 * 1
    assert costs(Action(Op.BLOCK_BACKWARD, 1, 0, 1)) == 2 * 4 * 1
    halves = [[[number // 2 for number in group] for group in table] for table in rows]
    assert step_costs(*halves, stage_layers=[3, 0], recompute=True) == costs
    assert step_costs(*rows, stage_layers=[3, 0], recompute=False)(Action(Op.BACKWARD, 1, 1, 1)) == 2

    unscaled = RowCosts(
        Costs(backward=3.0, prompt_backward=4.0, block_backward=4.0, stages=(3.0, 1.0)),
        *(tuple(map(tuple, table)) for table in rows),
    )
    description = Description(groups=(GroupShape(2, 1), GroupShape(1, 2, (1, 0))), pp_size=2, max_live_prefixes=2)
    assert make_plan(description, costs) == make_plan(description, unscaled)
