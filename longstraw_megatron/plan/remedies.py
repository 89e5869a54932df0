"""What would make a run fit its device: one key, another layout, several keys together, and last another gradient."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from longstraw_megatron.config import Config, ParallelConfig
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.trainer import steps_of
from longstraw_megatron.plan.items import ACTIVATIONS, Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import MemoryPlan, plan_memory
from longstraw_megatron.plan.search import candidates, check_layout, has_experts
from longstraw_megatron.plan.workload import Workload

SHORTEST_SEGMENT = 256
# all that shorter segments can make smaller: graphs and buffers, held inputs, and the padding of recorded experts
OF_A_SEGMENT = (*ACTIVATIONS, Item.STAGE_INPUTS, Item.STATE, Item.FRAGMENTATION)


@dataclass(frozen=True)
class Budget:
    """The rollouts and the GPUs that a run has, and the bytes of each device."""

    workloads: Sequence[Workload]
    num_gpus: int
    memory_bytes: float

    def plans(self, config: Config) -> list[MemoryPlan]:
        """Of the groups of a pass over the rollouts that take most."""
        dp = Layout(config, self.workloads[0], self.num_gpus).dp
        num_groups = -(-len(self.workloads) // dp)
        # the longest prompt leaves the most state, the longest responses the largest graph
        chosen = {
            max(self.workloads, key=lambda workload: workload.prompt_length),
            max(self.workloads, key=lambda workload: max(workload.response_lengths, default=0)),
        }
        steps = [len(step) for step in steps_of(len(self.workloads), config.groups_per_step)]
        return [
            plan_memory(Layout(config, workload, self.num_gpus), num_groups=num_groups, steps=steps)
            for workload in chosen
        ]

    def worst_plan(self, config: Config) -> MemoryPlan:
        return max(self.plans(config), key=lambda plan: plan.worst.total)

    def fits(self, config: Config) -> bool:
        return self.worst_plan(config).worst.total <= self.memory_bytes

    def excess(self, config: Config) -> float:
        """Bytes over the device, summed over stages and moments: 0 where it fits.

        A key that helps one moment of two makes it smaller, though the worst moment may be the other.
        """
        moments = (items for plan in self.plans(config) for stage in plan.stages for items in stage.phases.values())
        return sum(max(0, sum(items.values()) - self.memory_bytes) for items in moments)

    def shorter_segments_may_fit(self, config: Config) -> bool:
        """Whether what no length of a segment changes fits: where it doesn't, there is no need to plan any."""
        moments = (items for plan in self.plans(config) for stage in plan.stages for items in stage.phases.values())
        rest = (sum(size for item, size in items.items() if item not in OF_A_SEGMENT) for items in moments)
        return max(rest) <= self.memory_bytes


@dataclass(frozen=True)
class Key:
    """A key with a value that a run may be easier with, and the items that it helps."""

    name: str
    value: Any
    helps: tuple[Item, ...]

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.name}={value}"

    def put_in(self, config: Config) -> Config:
        return _replace(config, self.name, self.value)


@dataclass(frozen=True)
class Remedy:
    """Words to add to a command with which it would fit, and the run that they make."""

    words: tuple[str, ...]
    config: Config
    keeps_gradient: bool = True


def _replace(tree: Any, name: str, value: Any) -> Any:
    """A dataclass with a dotted field replaced."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(tree, **{first: _replace(getattr(tree, first), rest, value) if rest else value})


def _shorter_segments(config: Config) -> Iterator[Key]:
    length = config.segment_length // 2
    while length >= SHORTEST_SEGMENT:
        yield Key("segment_length", length, (Item.GRAPH, Item.COMMUNICATION))
        length //= 2


def _longer_segments(config: Config) -> Key:
    return Key("segment_length", 4 * config.segment_length, (Item.BOUNDARIES,))


def other_keys(config: Config) -> Iterator[Key]:
    """Keys that leave the segments, the layout and the gradient as they are, and that `config` may have."""
    return (key for key in _every_other_key(config) if _is_legal(key, config))


def _is_legal(key: Key, config: Config) -> bool:
    try:
        key.put_in(config)
    except RefusedError:
        return False
    return True


def _every_other_key(config: Config) -> Iterator[Key]:
    state, optimizer, is_low = config.state, config.optimizer, config.precision == "bf16"
    kept = (Item.STATE, Item.STATE_GRADIENTS, Item.BOUNDARIES)
    if config.recompute != "full":
        yield Key("recompute", "full", (Item.GRAPH,))
    if config.branches_per_microbatch > 1:
        yield Key("branches_per_microbatch", 1, (Item.GRAPH,))
    if is_low and state.grad_dtype != "bf16":
        yield Key("state.grad_dtype", "bf16", (Item.STATE_GRADIENTS,))
    if is_low and not optimizer.optimizer_cpu_offload:
        yield Key("optimizer.optimizer_cpu_offload", True, (Item.OPTIMIZER,))
    if is_low and optimizer.grad_reduce_in_fp32:
        yield Key("optimizer.grad_reduce_in_fp32", False, (Item.GRADIENTS,))
    if config.device == "cuda" and state.location == "device":
        yield Key("state.location", "host", kept)
    if config.device == "cuda" and state.stage_inputs == "device" and config.parallel.pp > 1:
        yield Key("state.stage_inputs", "host", (Item.STAGE_INPUTS,))
    if config.response_block is None:
        yield Key("response_block", config.segment_length, (Item.GRAPH, Item.LOGITS))
    if config.schedule.max_live_prefixes > 1:
        yield Key("schedule.max_live_prefixes", 1, kept)
    if state.reuse_steps:
        yield Key("state.reuse_steps", 0, (Item.STATE, Item.BOUNDARIES))


def single_key(config: Config, budget: Budget, item: Item) -> Remedy | None:
    """The first key that is enough alone, those that help `item` first."""
    keys = list(other_keys(config))
    if budget.shorter_segments_may_fit(config):
        # behind recompute and the microbatch, which cost less
        first = sum(key.name in ("recompute", "branches_per_microbatch") for key in keys)
        keys[first:first] = _shorter_segments(config)
    keys.append(_longer_segments(config))
    for key in sorted(keys, key=lambda key: item not in key.helps):
        changed = key.put_in(config)
        if budget.fits(changed):
            return Remedy((str(key),), changed)
    return None


def _distance(a: ParallelConfig, b: ParallelConfig) -> float:
    """How far two layouts are: the factors between their sizes."""
    return sum(abs(math.log2(getattr(a, size) / getattr(b, size))) for size in ("tp", "cp", "pp", "ep"))


def other_layout(config: Config, budget: Budget) -> Remedy | None:
    """The nearest other layout of as many GPUs that fits."""
    sizes = ("tp", "cp", "pp", "ep") if has_experts(config) else ("tp", "cp", "pp")
    others = sorted(
        candidates(budget.num_gpus, has_experts=has_experts(config)),
        key=lambda other: (_distance(other, config.parallel), str(other)),
    )
    for parallel in others:
        changed = dataclasses.replace(config, parallel=parallel)
        try:
            check_layout(changed)
            fits = budget.fits(changed)
        except RefusedError:
            continue
        if fits:
            return Remedy(tuple(f"parallel.{size}={getattr(parallel, size)}" for size in sizes), changed)
    return None


def _next_key(config: Config, budget: Budget, excess: float) -> Key | None:
    """The key that leaves the least excess, below `excess`; segments, whose schedules take long to plan, come last."""
    found = {key: budget.excess(key.put_in(config)) for key in other_keys(config)}
    best = min(found, key=found.__getitem__, default=None)
    if best is not None and found[best] < excess:
        return best
    half = next(_shorter_segments(config), None) if budget.shorter_segments_may_fit(config) else None
    for key in (half, _longer_segments(config)):
        if key is not None and budget.excess(key.put_in(config)) < excess:
            return key
    return None


def _without(name: str, keys: Iterable[Key], config: Config) -> Config | None:
    """All keys but one; None where the others may not stand without it."""
    try:
        for key in keys:
            config = config if key.name == name else key.put_in(config)
    except RefusedError:
        return None
    return config


def several_keys(config: Config, budget: Budget) -> Remedy | None:
    """Keys that are enough together: the one that helps most, then the next, without those that prove superfluous."""
    chosen: dict[str, Key] = {}
    changed = config
    while excess := budget.excess(changed):
        key = _next_key(changed, budget, excess)
        if key is None:
            return None
        chosen[key.name] = key
        changed = key.put_in(changed)
    for name in reversed(list(chosen)):
        fewer = _without(name, chosen.values(), config)
        if fewer is not None and budget.fits(fewer):
            del chosen[name]
            changed = fewer
    return Remedy(tuple(map(str, chosen.values())), changed)


def find_remedy(config: Config, budget: Budget, item: Item) -> Remedy | None:
    """What would make `config` fit with the least change: `item` is what takes most.

    A key, a layout, keys together. `gradient=detached`, alone or with keys, computes another gradient and comes last.
    """
    remedy = single_key(config, budget, item) or other_layout(config, budget) or several_keys(config, budget)
    if remedy is not None or config.gradient != "exact":
        return remedy
    detached = dataclasses.replace(config, gradient="detached")
    remedy = several_keys(detached, budget)
    return remedy and Remedy(("gradient=detached", *remedy.words), remedy.config, keeps_gradient=False)
