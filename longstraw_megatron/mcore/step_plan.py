"""The plan of one optimizer step, from a cut batch and Megatron's config: `schedule.step` makes and proves it."""

from collections.abc import Sequence

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_config import TransformerConfig

from longstraw_megatron.mcore.group_work import GroupWork
from longstraw_megatron.schedule import Action, Description, StepPlan, prove_step, step_costs


def stage_layers(config: TransformerConfig) -> tuple[int, ...] | None:
    """Decoder layers of each virtual stage where the config has a layout of its own; None: even stages."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return None
    vpp = layout.virtual_pipeline_model_parallel_size
    return tuple(
        layout.layout[pp][vp].count(LayerType.decoder) for vp in range(vpp) for pp in range(len(layout.layout))
    )


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
    costs = step_costs(
        [[layout.rows for layout in work.segment_layouts] for work in works],
        [[layout.rows for layout in work.branch_layouts] for work in works],
        [[layout.rows for layouts in work.block_layouts for layout in layouts] for work in works],
        stage_layers=stage_layers(config),
        recompute=config.recompute_granularity == "full",
    )
    return prove_step(description, costs)


def count_units(actions: Sequence[Action]) -> dict:
    """How often each op of stage 0 is done: the totals of progress bars."""
    totals: dict = {}
    for action in actions:
        if action.op.is_compute and action.stage == 0:
            totals[action.op] = totals.get(action.op, 0) + 1
    return totals
