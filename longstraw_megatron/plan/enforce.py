"""Refusing a run that would not fit, before a weight is made, with what would."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from longstraw_megatron.config import Config, HardwareConfig, ParallelConfig
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.architectures import architecture_of, glm_dsa
from longstraw_megatron.mcore.trainer import steps_of
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import StageMemory, plan_memory
from longstraw_megatron.plan.search import candidates, check_layout
from longstraw_megatron.plan.workload import Workload

GIB = 2**30
SHORTEST_SEGMENT = 256
CUDA_RESERVED, CUDA_FRAGMENTATION = 5e9, 0.02  # as the files of hydra_configs/hardware have them


def device_hardware(config: Config) -> HardwareConfig:
    """The allowance of the device that the run is for, whatever `hardware` was chosen to plan with."""
    on_cuda = config.device == "cuda"
    return dataclasses.replace(
        config.hardware,
        reserved_bytes=CUDA_RESERVED if on_cuda else 0.0,
        fragmentation=CUDA_FRAGMENTATION if on_cuda else 0.0,
    )


def worst_stage(config: Config, workloads: Sequence[Workload], num_gpus: int) -> StageMemory:
    """The stage that takes most, over the workloads of a pass over the rollouts."""
    dp = Layout(config, workloads[0], num_gpus).dp
    num_groups = min(-(-len(workloads) // dp), config.schedule.max_live_prefixes)
    # the longest prompt leaves the most state, the longest responses the largest graph
    chosen = {
        max(workloads, key=lambda workload: workload.prompt_length),
        max(workloads, key=lambda workload: max(workload.response_lengths, default=0)),
    }
    steps = [len(step) for step in steps_of(len(workloads), config.groups_per_step)]
    plans = [plan_memory(Layout(config, workload, num_gpus), num_groups=num_groups, steps=steps) for workload in chosen]
    return max((plan.worst for plan in plans), key=lambda stage: stage.total)


def easier_keys(config: Config, item: Item) -> Iterator[tuple[str, Config]]:
    """Runs that change one key, those that help `item` first: what to say, and the changed keys."""
    change = dataclasses.replace
    options: list[tuple[str, Config, tuple[Item, ...]]] = []
    if config.recompute != "full":
        options.append(("recompute=full", change(config, recompute="full"), (Item.GRAPH,)))
    if config.branches_per_microbatch > 1:
        changed = change(config, branches_per_microbatch=1)
        options.append(("branches_per_microbatch=1", changed, (Item.GRAPH,)))
    length = config.segment_length // 2
    while length >= SHORTEST_SEGMENT:
        changed = change(config, segment_length=length)
        options.append((f"segment_length={length}", changed, (Item.GRAPH, Item.COMMUNICATION)))
        length //= 2
    if config.precision == "bf16" and config.state.grad_dtype != "bf16":
        changed = change(config, state=change(config.state, grad_dtype="bf16"))
        options.append(("state.grad_dtype=bf16", changed, (Item.STATE_GRADIENTS,)))
    if config.precision == "bf16" and not config.optimizer.optimizer_cpu_offload:
        changed = change(config, optimizer=change(config.optimizer, optimizer_cpu_offload=True))
        options.append(("optimizer.optimizer_cpu_offload=true", changed, (Item.OPTIMIZER,)))
    if config.precision == "bf16" and config.optimizer.grad_reduce_in_fp32:
        changed = change(config, optimizer=change(config.optimizer, grad_reduce_in_fp32=False))
        options.append(("optimizer.grad_reduce_in_fp32=false", changed, (Item.GRADIENTS,)))
    if config.device == "cuda" and config.state.location == "device":
        changed = change(config, state=change(config.state, location="host"))
        options.append(("state.location=host", changed, (Item.STATE, Item.STATE_GRADIENTS, Item.BOUNDARIES)))
    if config.device == "cuda" and config.state.stage_inputs == "device" and config.parallel.pp > 1:
        changed = change(config, state=change(config.state, stage_inputs="host"))
        options.append(("state.stage_inputs=host", changed, (Item.STAGE_INPUTS,)))
    if config.response_block is None:
        changed = change(config, response_block=config.segment_length)
        options.append((f"response_block={config.segment_length}", changed, (Item.GRAPH, Item.LOGITS)))
    longer = change(config, segment_length=4 * config.segment_length)
    options.append((f"segment_length={longer.segment_length}", longer, (Item.BOUNDARIES,)))
    if config.schedule.max_live_prefixes > 1:
        changed = change(config, schedule=change(config.schedule, max_live_prefixes=1))
        options.append(("schedule.max_live_prefixes=1", changed, (Item.STATE, Item.STATE_GRADIENTS, Item.BOUNDARIES)))
    if config.state.reuse_steps:
        changed = change(config, state=change(config.state, reuse_steps=0))
        options.append(("state.reuse_steps=0", changed, (Item.STATE, Item.BOUNDARIES)))
    if config.gradient == "exact":
        helped = (Item.STATE_GRADIENTS, Item.BOUNDARIES, Item.STAGE_INPUTS)
        options.append(("gradient=detached", change(config, gradient="detached"), helped))
    for helps in (True, False):
        yield from ((words, changed) for words, changed, items in options if (item in items) is helps)


def _distance(a: ParallelConfig, b: ParallelConfig) -> float:
    """How far two layouts are: the factors between their sizes."""
    return sum(abs(math.log2(getattr(a, size) / getattr(b, size))) for size in ("tp", "cp", "pp", "ep"))


def _layout_words(parallel: ParallelConfig, has_experts: bool) -> str:
    sizes = ("tp", "cp", "pp", "ep") if has_experts else ("tp", "cp", "pp")
    return " ".join(f"parallel.{size}={getattr(parallel, size)}" for size in sizes)


def nearest_that_fits(
    config: Config, workloads: Sequence[Workload], num_gpus: int, memory_bytes: float, item: Item
) -> str | None:
    """The first change of one key, or else the nearest other layout of as many GPUs, that fits; None without one."""
    for words, changed in easier_keys(config, item):
        if worst_stage(changed, workloads, num_gpus).total <= memory_bytes:
            return words
    has_experts = architecture_of(config.model.hf_config) is glm_dsa
    others = sorted(
        candidates(num_gpus, has_experts=has_experts), key=lambda other: (_distance(other, config.parallel), str(other))
    )
    for parallel in others:
        changed = dataclasses.replace(config, parallel=parallel)
        try:
            check_layout(changed)
            fits = worst_stage(changed, workloads, num_gpus).total <= memory_bytes
        except RefusedError:
            continue
        if fits:
            return _layout_words(parallel, has_experts)
    return None


def refuse_too_big(config: Config, workloads: Sequence[Workload], *, num_gpus: int, memory_bytes: float) -> None:
    """Plan a training run against a device of `memory_bytes`.

    Raises:
        RefusedError: it does not fit; the item that takes most, and the nearest key or layout with which it would.
    """
    config = dataclasses.replace(config, hardware=device_hardware(config))
    stage = worst_stage(config, workloads, num_gpus)
    if stage.total <= memory_bytes:
        return
    item = max(stage.items, key=stage.items.__getitem__)
    remedy = nearest_that_fits(config, workloads, num_gpus, memory_bytes, item)
    advice = f"{remedy} would fit" if remedy else f"no single key and no layout of {num_gpus} GPUs would fit, take more"
    last = stage.first_rank + stage.num_ranks - 1
    ranks = f"rank {last}" if stage.num_ranks == 1 else f"each of ranks {stage.first_rank} to {last}"
    raise RefusedError(
        f"The plan takes {stage.total / GIB:.2f} GiB on {ranks}, most of it for {item} "
        f"({stage.items[item] / GIB:.2f} GiB), and the device has {memory_bytes / GIB:.2f} GiB: {advice} "
        "(plan.enforce=false tries it all the same)."
    )
