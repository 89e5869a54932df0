"""A plan as tables of a terminal, and as JSON."""

import dataclasses
from collections.abc import Callable

from longstraw_megatron.logging import format_table
from longstraw_megatron.plan.dry_run import DryRunResult
from longstraw_megatron.plan.items import ACTIVATIONS, Item
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import MemoryPlan, StageMemory
from longstraw_megatron.plan.search import Candidate, Search
from longstraw_megatron.plan.time import TimePlan

LISTED = 12  # layouts of a search that are shown; JSON has all


def _number_of(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _gb(num_bytes: float) -> float:
    return round(num_bytes / 1e9, 3 if num_bytes < 1e9 else 2)


def _unit_for(num_bytes: float) -> tuple[str, Callable[[float], float]]:
    """A unit in which so many bytes are some digits before the point, and the function that takes bytes to it."""
    if num_bytes >= 1e9:
        return "GB", _gb
    return "MB", lambda size: round(size / 1e6, 3)


def ranks_of(stage: StageMemory) -> str:
    """The global ranks of a stage, as in 0-3."""
    last = stage.first_rank + stage.num_ranks - 1
    return f"{stage.first_rank}" if stage.num_ranks == 1 else f"{stage.first_rank}-{last}"


def layout_words(layout: Layout) -> str:
    """Its sizes above 1, as in TP4 PP2."""
    p = layout.config.parallel
    sizes = {"TP": p.tp, "CP": p.cp, "PP": p.pp, "VPP": p.vpp, "EP": p.ep, "DP": layout.dp}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def describe(layout: Layout) -> str:
    """One line: what is planned."""
    config, workload = layout.config, layout.workload
    what = f"{config.model.name}, {layout_words(layout)} on {layout.num_gpus} x {config.hardware.name}"
    responses = f"{_number_of(len(workload.response_lengths), 'response')} of {max(workload.response_lengths)}"
    if layout.num_groups > 1:
        responses += f", {layout.num_groups} groups a rank"
    return (
        f"{what}, {config.precision}, gradient={config.gradient}, prompt {workload.prompt_length}, {responses}, "
        f"segments of {config.segment_length}, recompute={config.recompute}"
    )


def ranks_of_node(layout: Layout) -> int:
    """Ranks that share the host memory of a node, at the most."""
    return min(layout.config.hardware.gpus_per_node, layout.num_gpus)


def format_memory(memory: MemoryPlan, budget: float, node_size: int) -> str:
    """Items by stage, in GB, and what is taken of host memory."""
    present = [item for item in Item if any(stage.items.get(item) or stage.host.get(item) for stage in memory.stages)]
    unit, scaled = _unit_for(memory.worst.total)
    columns = [f"item, {unit}", *(f"ranks {ranks_of(stage)}" for stage in memory.stages)]
    rows = [[item.value, *(scaled(stage.items.get(item, 0)) for stage in memory.stages)] for item in present]
    rows.append(["sum", *(scaled(stage.total) for stage in memory.stages)])
    rows.append(["of the device", *(f"{100 * stage.total / budget:.0f} %" for stage in memory.stages)])
    rows.append(["at the end of", *(stage.phase for stage in memory.stages)])
    if memory.host_total:
        rows.append(["in host memory", *(scaled(stage.host_total) for stage in memory.stages)])
    lines = [format_table(rows, columns)]
    if memory.host_total:
        node = _gb(memory.host_total_of_node(node_size))
        lines.append(
            f"host memory: {_gb(memory.host_total)} GB a rank, {node} GB a node of {node_size} ranks, at the most"
        )
    over = memory.worst.total - budget
    if over > 0:
        lines.append(f"does not fit: {scaled(over)} {unit} more than a device has")
    return "\n".join(lines)


def format_time(time: TimePlan) -> str:
    """Seconds by phase and by kind of work, of the busiest rank."""
    rows = [(name, seconds) for name, seconds in time.phases.items()]
    rows += [("waiting (bubble)", time.makespan - sum(time.phases.values())), ("reduction of gradients", time.reduce)]
    rows += [("optimizer", time.optimizer), ("step", time.step)]
    if time.reusing_step is not None:
        rows.append(("step that reuses the state, drift not checked", time.reusing_step))
    work = sorted(time.work.items(), key=lambda pair: -pair[1])
    return format_table(rows, ("phase", "seconds")) + "\n\n" + format_table(work, ("of which", "seconds"))


def compare_dry_run(stage: StageMemory, result: DryRunResult, seconds: float) -> str:
    """Formula and dry run of one rank, item by item, at the dry run's peak; `seconds` is how long that took.

    Where the formula has no such moment ("block walk"), its own worst one stands beside it.
    """
    peak = result.peak
    moment = peak.name if peak.name in stage.phases else stage.phase
    planned, rows = stage.phases[moment], []
    unit, scaled = _unit_for(peak.peak)
    for name, items in [(item.value, (item,)) for item in Item if item not in (*ACTIVATIONS, Item.FRAGMENTATION)] + [
        ("graph, logits, buffers", ACTIVATIONS)
    ]:
        ours, theirs = (sum(side.get(item, 0) for item in items) for side in (planned, peak.items))
        if ours or theirs:
            rows.append((name, scaled(ours), scaled(theirs)))
    tensors = sum(planned.values()) - planned[Item.FRAGMENTATION]
    rows.append(("sum", scaled(tensors), scaled(peak.peak)))
    note = f"dry run of rank {result.rank}, {seconds:.0f} s: {tensors / peak.peak - 1:+.1%} formula against dry run"
    if moment != stage.phase:
        note += f"\nthe formula's worst moment is {stage.phase}, {scaled(stage.tensors)} {unit}"
    columns = (f"item, {unit}", f"formula, {moment}", f"dry run, {peak.name}")
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
        "reusing_step_seconds": time.reusing_step,
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
        "worst_ranks": ranks_of(memory.worst),
        "host_bytes_of_node": memory.host_total_of_node(ranks_of_node(layout)),
        "stages": [_stage_json(stage) for stage in memory.stages],
        "time": _time_json(time),
    }


def _search_row(found: Candidate) -> tuple:
    items = found.memory.worst.items
    largest = max(items, key=items.__getitem__)
    step = None if found.time is None else found.time.step
    per_group = None if step is None else step / found.layout.dp
    bubble = None if found.time is None else f"{100 * found.time.bubble_fraction:.0f} %"
    return (layout_words(found.layout), _gb(found.total), str(largest), _gb(items[largest]), step, per_group, bubble)


def format_search(search: Search, budget: float) -> str:
    """The layouts that fit, by time, then the nearest that don't, and how many were refused."""
    columns = ("layout", "GB", "most of it", "GB", "seconds a step", "a group", "bubble")
    parts = []
    for name, found in (("fit", search.fitting), ("do not fit", search.too_big)):
        verb = name if len(found) != 1 else {"fit": "fits", "do not fit": "does not fit"}[name]
        parts.append(f"{_number_of(len(found), 'layout')} {verb} in {_gb(budget)} GB" + (":" if found else "."))
        if found:
            parts.append(format_table([_search_row(candidate) for candidate in found[:LISTED]], columns))
            if len(found) > LISTED:
                parts.append(f"and {len(found) - LISTED} more (format=json has all)")
    reasons = ", ".join(f"{count} by {reason}" for reason, count in search.illegal.most_common())
    number = sum(search.illegal.values())
    verb = "is" if number == 1 else "are"
    parts.append(
        f"{_number_of(number, 'layout')} {verb} not legal for this model" + (f": {reasons}." if reasons else ".")
    )
    return "\n".join(parts)
