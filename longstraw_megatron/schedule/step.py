"""The plan of one optimizer step from the rows that it runs: made in one place, for who runs it and who plans it.

An action costs its rows times its stage's layers, a backward twice that and one forward more where activations are
recomputed. It shapes the order only, and only ratios count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from longstraw_megatron.schedule.actions import Plan
from longstraw_megatron.schedule.check import PlanReport, check_plan
from longstraw_megatron.schedule.description import Costs, Description, RowCosts
from longstraw_megatron.schedule.plans import make_plan

Rows = Sequence[Sequence[int]]  # of a shard, [group][unit]


@dataclass(frozen=True)
class StepPlan:
    """A proven plan: `plan[pp_rank]` is what a rank does, in order. The report's times are in the units of the costs
    that it was made with."""

    plan: Plan
    report: PlanReport
    description: Description

    @property
    def max_pending_sends(self) -> int:
        """Sends that a channel keeps: enough never to deadlock, and as many as a stage may run ahead."""
        return max(self.report.min_pending_sends, self.description.max_run_ahead)


def step_costs(
    segment_rows: Rows,
    microbatch_rows: Rows,
    block_rows: Rows,
    *,
    stage_layers: Sequence[int] | None,
    recompute: bool,
) -> RowCosts:
    """The costs that a step's plan is made with.

    Args:
        segment_rows: rows of a shard of each prompt segment, padding included, by group.
        microbatch_rows: of each microbatch's last block.
        block_rows: of its earlier blocks, counted over the group.
        stage_layers: layers of each virtual stage; None: even stages.
        recompute: whether a backward runs its forward again.
    """
    backward = 2.0 + recompute
    walk = 1.0 + backward
    stages = None if stage_layers is None else tuple(float(max(count, 1)) for count in stage_layers)
    tables = (segment_rows, microbatch_rows, block_rows)
    # layouts that cut the same work finer get equal costs, and so share one plan in the cache
    unit = gcd(*(rows for table in tables for group in table for rows in group)) or 1
    segments, microbatches, blocks = (tuple(tuple(r // unit for r in group) for group in table) for table in tables)
    return RowCosts(
        Costs(backward=backward, prompt_backward=walk, block_backward=walk, stages=stages),
        segment_rows=segments,
        microbatch_rows=microbatches,
        block_rows=blocks,
    )


@lru_cache(maxsize=32)
def prove_step(description: Description, costs: Costs | RowCosts) -> StepPlan:
    """The plan of a description, made with these costs and checked.

    Raises:
        PlanError: the plan would deadlock or hold more than its limits.
    """
    plan = make_plan(description, costs)
    return StepPlan(plan, check_plan(plan, description, costs), description)
