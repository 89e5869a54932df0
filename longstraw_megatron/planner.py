"""`longstraw plan`: does a model at a prompt length fit some GPUs, in which layout, in what time. No GPU is touched."""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from longstraw_megatron.compose import load_config
from longstraw_megatron.config import Config, PlanConfig, check_world_size
from longstraw_megatron.config_effect import keys_without_effect
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.logging import format_table
from longstraw_megatron.mcore.monitor import free_host_memory
from longstraw_megatron.plan.bars import draw_bars
from longstraw_megatron.plan.draw import draw_png, draw_text
from longstraw_megatron.plan.dry_run import DryRunResult, dry_run
from longstraw_megatron.plan.items import ACTIVATIONS, Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import MemoryPlan, StageMemory, plan_memory
from longstraw_megatron.plan.search import Candidate, Search, check_layout, search_layouts
from longstraw_megatron.plan.time import TimePlan, plan_time
from longstraw_megatron.plan.workload import Workload

logger = logging.getLogger("longstraw_megatron")

LISTED = 12  # layouts of a search that are shown; JSON has all
MEMORY_PNG, SCHEDULE_PNG = "plan_memory.png", "plan_schedule.png"
SHORT = tuple(field.name for field in dataclasses.fields(PlanConfig))  # `search=true` is `plan.search=true`


def with_plan_keys(overrides: Sequence[str]) -> list[str]:
    """The words with the door's own keys written out: KEY=VALUE for plan.KEY=VALUE."""
    return [f"plan.{word}" if word.split("=", 1)[0] in SHORT else word for word in overrides]


def resolve_hardware(config: Config) -> Config:
    """`auto` replaced by what the hardware is; refused where the two contradict each other."""
    hardware = config.hardware
    if config.device not in ("auto", hardware.device):
        raise RefusedError(
            f"hardware={hardware.name} is a {hardware.device} device, got device={config.device}; leave device=auto."
        )
    precision = ("bf16" if hardware.device == "cuda" else "fp32") if config.precision == "auto" else config.precision
    return dataclasses.replace(config, device=hardware.device, precision=precision)


def num_gpus_of(config: Config) -> int:
    """`plan.num_gpus`, or the fewest that the layout divides."""
    p = config.parallel
    return config.plan.num_gpus or math.lcm(p.tp * p.cp * p.pp, p.ep * p.etp * p.pp)


def device_bytes(config: Config, num_gpus: int) -> float:
    """A device's memory: as its file says, or a rank's share of what this machine has free."""
    if config.hardware.memory_bytes is not None:
        return config.hardware.memory_bytes
    return free_host_memory() / min(num_gpus, config.hardware.gpus_per_node)


def _gb(num_bytes: float) -> float:
    return round(num_bytes / 1e9, 3 if num_bytes < 1e9 else 2)


def _ranks(stage: StageMemory) -> str:
    last = stage.first_rank + stage.num_ranks - 1
    return f"{stage.first_rank}" if stage.num_ranks == 1 else f"{stage.first_rank}-{last}"


def _layout_words(layout: Layout) -> str:
    p = layout.config.parallel
    sizes = {"TP": p.tp, "CP": p.cp, "PP": p.pp, "VPP": p.vpp, "EP": p.ep, "DP": layout.dp}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def describe(layout: Layout) -> str:
    """One line: what is planned."""
    config, workload = layout.config, layout.workload
    what = f"{config.model.name}, {_layout_words(layout)} on {layout.num_gpus} x {config.hardware.name}"
    responses = f"{len(workload.response_lengths)} responses of {max(workload.response_lengths)}"
    return (
        f"{what}, {config.precision}, gradient={config.gradient}, prompt {workload.prompt_length}, {responses}, "
        f"segments of {config.segment_length}, recompute={config.recompute}"
    )


def _ranks_of_node(layout: Layout) -> int:
    return min(layout.config.hardware.gpus_per_node, layout.num_gpus)


def format_memory(memory: MemoryPlan, budget: float, ranks_of_node: int) -> str:
    """Items by stage, in GB, and what is taken of host memory."""
    present = [item for item in Item if any(stage.items.get(item) or stage.host.get(item) for stage in memory.stages)]
    columns = ["item, GB", *(f"ranks {_ranks(stage)}" for stage in memory.stages)]
    rows = [[item.value, *(_gb(stage.items.get(item, 0)) for stage in memory.stages)] for item in present]
    rows.append(["sum", *(_gb(stage.total) for stage in memory.stages)])
    rows.append(["of the device", *(f"{100 * stage.total / budget:.0f} %" for stage in memory.stages)])
    rows.append(["at the end of", *(stage.phase for stage in memory.stages)])
    if not memory.host_total:
        return format_table(rows, columns)
    rows.append(["in host memory", *(_gb(stage.host_total) for stage in memory.stages)])
    node = _gb(memory.host_total_of_node(ranks_of_node))
    host = f"host memory: {_gb(memory.host_total)} GB a rank, {node} GB a node of {ranks_of_node} ranks, at the most"
    return format_table(rows, columns) + "\n" + host


def format_time(time: TimePlan) -> str:
    """Seconds by phase and by kind of work, of the busiest rank."""
    rows = [(name, seconds) for name, seconds in time.phases.items()]
    rows += [("waiting (bubble)", time.makespan - sum(time.phases.values())), ("reduction of gradients", time.reduce)]
    rows += [("optimizer", time.optimizer), ("step", time.step)]
    work = sorted(time.work.items(), key=lambda pair: -pair[1])
    return format_table(rows, ("phase", "seconds")) + "\n\n" + format_table(work, ("of which", "seconds"))


def compare_dry_run(stage: StageMemory, result: DryRunResult, seconds: float) -> str:
    """Formula and dry run of one rank, item by item, at the dry run's peak; `seconds` is how long that took.

    Where the formula has no such moment ("block walk"), its own worst one stands beside it.
    """
    peak = result.peak
    moment = peak.name if peak.name in stage.phases else stage.phase
    planned, rows = stage.phases[moment], []
    for name, items in [(item.value, (item,)) for item in Item if item not in (*ACTIVATIONS, Item.FRAGMENTATION)] + [
        ("graph, logits, buffers", ACTIVATIONS)
    ]:
        ours, theirs = (sum(side.get(item, 0) for item in items) for side in (planned, peak.items))
        if ours or theirs:
            rows.append((name, _gb(ours), _gb(theirs)))
    tensors = sum(planned.values()) - planned[Item.FRAGMENTATION]
    rows.append(("sum", _gb(tensors), _gb(peak.peak)))
    note = f"dry run of rank {result.rank}, {seconds:.0f} s: {tensors / peak.peak - 1:+.1%} formula against dry run" + (
        f"\nthe formula's worst moment is {stage.phase}, {_gb(stage.tensors)} GB" if moment != stage.phase else ""
    )
    columns = ("item, GB", f"formula, {moment}", f"dry run, {peak.name}")
    return note + "\n" + format_table(rows, columns)


def _stage_json(stage: StageMemory) -> dict:
    return {
        "ranks": [stage.first_rank, stage.first_rank + stage.num_ranks - 1],
        "phase": stage.phase,
        "bytes": {item.value: size for item, size in stage.items.items()},
        "host_bytes": {item.value: size for item, size in stage.host.items()},
        "host_total_bytes": stage.host_total,
        "total_bytes": stage.total,
        "phases": {name: sum(items.values()) for name, items in stage.phases.items()},
        "parameters": stage.parameters.total,
    }


def _time_json(time: TimePlan | None) -> dict | None:
    if time is None:
        return None
    return {
        "step_seconds": time.step,
        "phases": time.phases,
        "work": time.work,
        "bubble_fraction": time.bubble_fraction,
        "reduce_seconds": time.reduce,
        "optimizer_seconds": time.optimizer,
    }


def layout_json(layout: Layout, memory: MemoryPlan, time: TimePlan | None, budget: float) -> dict:
    """One layout as `format=json` prints it. Bytes are bytes, times are seconds."""
    return {
        "parallel": dataclasses.asdict(layout.config.parallel) | {"dp": layout.dp},
        "num_gpus": layout.num_gpus,
        "fits": memory.worst.total <= budget,
        "device_bytes": budget,
        "worst_ranks": _ranks(memory.worst),
        "host_bytes_of_node": memory.host_total_of_node(_ranks_of_node(layout)),
        "stages": [_stage_json(stage) for stage in memory.stages],
        "time": _time_json(time),
    }


def _search_row(found: Candidate) -> tuple:
    items = found.memory.worst.items
    largest = max(items, key=items.__getitem__)
    step = None if found.time is None else found.time.step
    per_group = None if step is None else step / found.layout.dp
    bubble = None if found.time is None else f"{100 * found.time.bubble_fraction:.0f} %"
    return (_layout_words(found.layout), _gb(found.total), str(largest), _gb(items[largest]), step, per_group, bubble)


def format_search(search: Search, budget: float) -> str:
    """The layouts that fit, by time, then the nearest that don't, and how many were refused."""
    columns = ("layout", "GB", "most of it", "GB", "seconds a step", "a group", "bubble")
    parts = []
    for name, found in (("fit", search.fitting), ("do not fit", search.too_big)):
        parts.append(f"{len(found)} layouts {name} in {_gb(budget)} GB" + (":" if found else "."))
        if found:
            parts.append(format_table([_search_row(candidate) for candidate in found[:LISTED]], columns))
            if len(found) > LISTED:
                parts.append(f"and {len(found) - LISTED} more (format=json has all)")
    reasons = ", ".join(f"{count} by {reason}" for reason, count in search.illegal.most_common())
    parts.append(
        f"{sum(search.illegal.values())} layouts are not legal for this model" + (f": {reasons}." if reasons else ".")
    )
    return "\n".join(parts)


def plan_search(config: Config, num_gpus: int) -> int:
    """Every layout of the GPUs."""
    budget = device_bytes(config, num_gpus)
    search = search_layouts(config, Workload.of(config), num_gpus, budget)
    if config.format == "json":
        found = [layout_json(c.layout, c.memory, c.time, budget) for c in (*search.fitting, *search.too_big)]
        print(json.dumps({"layouts": found, "illegal": dict(search.illegal)}, indent=2))
    else:
        print(format_search(search, budget))
    best = (search.fitting or search.too_big)[:LISTED]
    if best:
        bars = [(_layout_words(found.layout), found.memory.worst.items) for found in best]
        _draw_memory(config, bars, f"{config.model.name} on {num_gpus} x {config.hardware.name}: worst rank", budget)
    return 0


def _run_dir(config: Config) -> Path:
    path = Path(config.run_dir)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _draw_memory(config: Config, bars, title: str, budget: float) -> None:
    path = _run_dir(config) / MEMORY_PNG
    draw_bars(bars, path, title=title, limit=budget)
    logger.info(f"memory as bars: {path}")


def plan_layout(config: Config, num_gpus: int) -> int:
    """The layout of `parallel`."""
    check_world_size(config, num_gpus)
    check_layout(config)
    layout = Layout(config, Workload.of(config), num_gpus)
    memory = plan_memory(layout)
    step, budget = plan_time(layout, memory), device_bytes(config, num_gpus)
    as_json = config.format == "json"
    if not as_json:
        parts = (describe(layout), format_memory(memory, budget, _ranks_of_node(layout)), format_time(step))
        print("\n\n".join(parts), flush=True)
    result, seconds = None, 0.0
    if config.plan.dry_run:
        rank = memory.worst.first_rank
        logger.info(f"dry run of rank {rank} of {num_gpus} begins")
        start = perf_counter()
        result = dry_run(config, layout.workload, rank=rank, world_size=num_gpus)
        seconds = perf_counter() - start
    if as_json:
        ran = None if result is None else dataclasses.asdict(result) | {"seconds": seconds}
        print(json.dumps(layout_json(layout, memory, step, budget) | {"dry_run": ran}, indent=2))
    elif result is not None:
        print("\n" + compare_dry_run(memory.worst, result, seconds))
    bars = [(f"ranks {_ranks(stage)}", stage.items) for stage in memory.stages]
    _draw_memory(config, bars, describe(layout).split(", gradient")[0], budget)
    if config.plan.draw:
        path = _run_dir(config) / SCHEDULE_PNG
        draw_png(step.report, path, title=_layout_words(layout), unit="s")
        if not as_json:
            print("\n" + draw_text(step.report))
        logger.info(f"schedule as a timeline: {path}")
    return 0


def _some_layout(config: Config, num_gpus: int) -> Config:
    """A run in which every key has an effect that has one in any layout that is planned."""
    if not config.plan.search or num_gpus == 1:
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, pp=num_gpus, stages=None))


def main(overrides: Sequence[str]) -> int:
    """Exit code 0. Raises RefusedError, for a layout that is not legal too, and DryRunError."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logger.setLevel(logging.INFO)
    config = resolve_hardware(load_config(with_plan_keys(overrides)))
    num_gpus = num_gpus_of(config)
    for warning in keys_without_effect(_some_layout(config, num_gpus)):
        logger.warning(warning)
    if config.plan.search:
        for key in ("dry_run", "draw"):
            if getattr(config.plan, key):
                raise RefusedError(f"plan.{key}=true is for one layout, got plan.search=true; ask for one of the two.")
        return plan_search(config, num_gpus)
    return plan_layout(config, num_gpus)
