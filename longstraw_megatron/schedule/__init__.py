"""Pipeline schedules as data: made, proven and timed by pure functions."""

from longstraw_megatron.schedule.actions import Action, Op, Plan, incoming, outgoing
from longstraw_megatron.schedule.check import PlanError, PlanReport, check_plan
from longstraw_megatron.schedule.description import Costs, Description, GroupShape, RowCosts
from longstraw_megatron.schedule.plans import make_plan
from longstraw_megatron.schedule.simulate import Span, Timeline, simulate
from longstraw_megatron.schedule.step import StepPlan, prove_step, step_costs

__all__ = [
    "Action",
    "Costs",
    "Description",
    "GroupShape",
    "Op",
    "Plan",
    "PlanError",
    "PlanReport",
    "RowCosts",
    "Span",
    "StepPlan",
    "Timeline",
    "check_plan",
    "incoming",
    "make_plan",
    "outgoing",
    "prove_step",
    "simulate",
    "step_costs",
]
