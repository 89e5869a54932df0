"""All layouts of a number of GPUs, those that fit first, the fastest of them first; what was left out is counted."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longstraw_megatron.config import Config, ParallelConfig
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures import architecture_of, glm_dsa, pipeline_layout, text_config
from longstraw_megatron.mcore.quiet import quiet_megatron_build
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import MemoryPlan, plan_memory
from longstraw_megatron.plan.time import TimePlan, plan_time
from longstraw_megatron.plan.workload import Workload


@dataclass(frozen=True)
class Candidate:
    """A legal layout with what it takes."""

    layout: Layout
    memory: MemoryPlan
    total: int  # bytes of the worst rank
    time: TimePlan | None  # None where it doesn't fit


@dataclass(frozen=True)
class Search:
    """`fitting` by time, `too_big` by bytes; `illegal` counts the refused ones by reason."""

    fitting: list[Candidate]
    too_big: list[Candidate]
    illegal: Counter[str]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def has_experts(config: Config) -> bool:
    return architecture_of(config.model.hf_config) is glm_dsa


def candidates(num_gpus: int, *, has_experts: bool) -> Iterator[ParallelConfig]:
    """Every (tp, cp, pp, ep) whose products divide `num_gpus`; vpp and etp are 1, sequence parallelism where tp > 1."""
    for tp in _divisors(num_gpus):
        for pp in _divisors(num_gpus // tp):
            for cp in _divisors(num_gpus // tp // pp):
                for ep in _divisors(num_gpus // pp) if has_experts else (1,):
                    yield ParallelConfig(tp=tp, cp=cp, pp=pp, vpp=1, ep=ep, etp=1, sp=tp > 1)


@quiet_megatron_build()
def check_layout(config: Config) -> None:
    """Refuse a layout that does not cut the model, by the same config that building it makes.

    Raises:
        RefusedError: in the words of the architecture, or of Megatron.
    """
    hf, p = text_config(config.model.hf_config), config.parallel
    layout = pipeline_layout(hf, pp=p.pp, vpp=p.vpp, stages=p.stages)
    try:
        architecture_of(hf).transformer_config(
            hf,
            tensor_model_parallel_size=p.tp,
            context_parallel_size=p.cp,
            pipeline_model_parallel_size=p.pp,
            pipeline_model_parallel_layout=layout,
            pipeline_dtype=torch.bfloat16,
            expert_model_parallel_size=p.ep,
            expert_tensor_parallel_size=p.etp,
            sequence_parallel=p.sp,
        )
    except RefusedError:
        raise
    except (AssertionError, ValueError) as error:
        raise RefusedError(f"parallel sizes {p} are not Megatron's: {error}") from error


def search_layouts(config: Config, workload: Workload, num_gpus: int, budget: float) -> Search:
    """Plan every layout of `num_gpus` against `budget` bytes of a device.

    Every data-parallel replica has a prompt group of its own: what counts is a step's seconds by the number of groups.
    """
    fitting, too_big, illegal = [], [], Counter()
    for parallel in candidates(num_gpus, has_experts=has_experts(config)):
        try:
            candidate = dataclasses.replace(config, parallel=parallel)
            check_layout(candidate)
            layout = Layout(candidate, workload, num_gpus)
            memory = plan_memory(layout)
        except RefusedError as error:
            illegal[_reason(error)] += 1
            continue
        total = memory.worst.total
        if total <= budget:
            fitting.append(Candidate(layout, memory, total, plan_time(layout, memory)))
        else:
            too_big.append(Candidate(layout, memory, total, None))
    fitting.sort(key=lambda found: (found.time.step / found.layout.dp, found.total))
    too_big.sort(key=lambda found: found.total)
    return Search(fitting, too_big, illegal)


def _reason(error: RefusedError) -> str:
    """The key that a refusal is about."""
    words = str(error).replace("=", " ").split()
    return next((word for word in words if word.startswith("parallel.")), "other")
