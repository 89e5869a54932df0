"""Refusing a run that would not fit, before a weight is made, with what would."""

from collections.abc import Sequence

from longstraw_megatron.config import Config
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.plan.memory import MemoryPlan
from longstraw_megatron.plan.remedies import Budget, Remedy, find_remedy
from longstraw_megatron.plan.workload import Workload

GIB = 2**30


def _host_words(remedy: Remedy, budget: Budget, planned: MemoryPlan) -> str:
    """What the remedy takes of host memory, where it is more than the run as it was planned."""
    plan = budget.worst_plan(remedy.config)
    if plan.host_total <= planned.host_total:
        return ""
    node = plan.host_total_of_node(remedy.config.hardware.gpus_per_node)
    return f" with {plan.host_total / GIB:.2f} GiB of host memory a rank, {node / GIB:.2f} GiB a node"


def _advice(remedy: Remedy | None, budget: Budget, planned: MemoryPlan) -> str:
    if remedy is None:
        return (
            f"no single key and no layout of {budget.num_gpus} GPUs would fit, nor would such keys together, take more"
        )
    are_keys = not remedy.words[0].startswith("parallel.")
    together = " together" if are_keys and len(remedy.words) > 1 else ""
    advice = f"{' '.join(remedy.words)}{together} would fit{_host_words(remedy, budget, planned)}"
    if remedy.keeps_gradient:
        return advice
    return f"{advice}, but detached is another gradient, without the part that flows through the prompt"


def refuse_too_big(config: Config, workloads: Sequence[Workload], *, num_gpus: int, memory_bytes: float) -> None:
    """Plan a training run against a device of `memory_bytes`; `config.hardware` has the allowance of that device.

    Raises:
        RefusedError: it does not fit; the item that takes most, and the nearest keys or layout with which it would.
    """
    budget = Budget(workloads, num_gpus, memory_bytes)
    planned = budget.worst_plan(config)
    stage = planned.worst
    if stage.total <= memory_bytes:
        return
    item = max(stage.items, key=stage.items.__getitem__)
    remedy = find_remedy(config, budget, item)
    last = stage.first_rank + stage.num_ranks - 1
    ranks = f"rank {last}" if stage.num_ranks == 1 else f"each of ranks {stage.first_rank} to {last}"
    raise RefusedError(
        f"The plan takes {stage.total / GIB:.2f} GiB on {ranks}, most of it for {item} "
        f"({stage.items[item] / GIB:.2f} GiB), and the device has {memory_bytes / GIB:.2f} GiB: "
        f"{_advice(remedy, budget, planned)} (plan.enforce=false tries it all the same)."
    )
