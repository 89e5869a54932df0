"""The plan of one optimizer step: made from what there is to run, and proven before it runs."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_config import TransformerConfig

from longstraw_megatron.mcore.group_work import GroupWork
from longstraw_megatron.schedule import (
    Action,
    Costs,
    Description,
    Plan,
    PlanReport,
    RowCosts,
    check_plan,
    make_plan,
)


@dataclass(frozen=True)
class StepPlan:
    """A proven plan: `plan[pp_rank]` is what a rank does, in order."""

    plan: Plan
    report: PlanReport
    description: Description

    @property
    def max_pending_sends(self) -> int:
        """Sends that a channel keeps: enough never to deadlock, and as many as a stage may run ahead."""
        return max(self.report.min_pending_sends, self.description.max_run_ahead)


def stage_layers(config: TransformerConfig) -> tuple[float, ...] | None:
    """Decoder layers of each virtual stage where the config has a layout of its own; None: even stages."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return None
    vpp = layout.virtual_pipeline_model_parallel_size
    counts = [layout.layout[pp][vp].count(LayerType.decoder) for vp in range(vpp) for pp in range(len(layout.layout))]
    return tuple(float(max(count, 1)) for count in counts)


@functools.lru_cache(maxsize=32)
def _proven(description: Description, costs: RowCosts) -> StepPlan:
    plan = make_plan(description, costs)
    return StepPlan(plan, check_plan(plan, description, costs), description)


def plan_step(
    works: Sequence[GroupWork],
    *,
    config: TransformerConfig,
    pp_size: int,
    vpp_size: int,
    exact: bool,
    forward_only: bool,
    max_live_prefixes: int,
) -> StepPlan:
    """The plan for the prompt groups of `works`, the same on all ranks of a pipeline and of a lockstep group.

    An action costs its rows times its stage's layers, and twice that more in a backward: it shapes the order only.

    Raises:
        PlanError: the plan would deadlock or hold more than its limits.
    """
    description = Description(
        groups=tuple(work.shape for work in works),
        pp_size=pp_size,
        vpp_size=vpp_size,
        exact=exact,
        forward_only=forward_only,
        max_live_prefixes=max_live_prefixes,
    )
    recomputed = 1.0 if config.recompute_granularity == "full" else 0.0
    walk = 3.0 + recomputed
    per_row = Costs(backward=2.0 + recomputed, prompt_backward=walk, block_backward=walk, stages=stage_layers(config))
    costs = RowCosts(
        per_row,
        segment_rows=tuple(tuple(layout.rows for layout in work.segment_layouts) for work in works),
        microbatch_rows=tuple(tuple(layout.rows for layout in work.branch_layouts) for work in works),
        block_rows=tuple(tuple(layout.rows for layouts in work.block_layouts for layout in layouts) for work in works),
    )
    return _proven(description, costs)


def count_units(actions: Sequence[Action]) -> dict:
    """How often each op of stage 0 is done: the totals of progress bars."""
    totals: dict = {}
    for action in actions:
        if action.op.is_compute and action.stage == 0:
            totals[action.op] = totals.get(action.op, 0) + 1
    return totals
