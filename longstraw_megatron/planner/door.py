"""The door of `longstraw plan`: one layout, or all of a number of GPUs."""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from longstraw_megatron.checks import check_experts, make_folder
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import Config, PlanConfig, check_world_size
from longstraw_megatron.config_effect import keys_without_effect
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.monitor import free_host_memory
from longstraw_megatron.plan.bars import draw_bars
from longstraw_megatron.plan.draw import draw_png, draw_text, legend
from longstraw_megatron.plan.dry_run import dry_run
from longstraw_megatron.plan.layout import Layout
from longstraw_megatron.plan.memory import MemoryPlan, StageMemory, plan_memory
from longstraw_megatron.plan.search import candidates, check_layout, has_experts, search_layouts
from longstraw_megatron.plan.time import plan_time
from longstraw_megatron.plan.workload import Workload
from longstraw_megatron.planner.tables import (
    LISTED,
    compare_dry_run,
    describe,
    format_memory,
    format_search,
    format_time,
    layout_json,
    layout_words,
    ranks_of,
    ranks_of_node,
)

logger = logging.getLogger("longstraw_megatron")

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


def plan_search(config: Config, num_gpus: int, run_dir: Path) -> int:
    """Every layout of the GPUs."""
    budget = device_bytes(config, num_gpus)
    number = sum(1 for _ in candidates(num_gpus, has_experts=has_experts(config)))
    logger.info(f"{number} layouts, about a tenth of a second each")
    search = search_layouts(config, Workload.of(config), num_gpus, budget)
    if config.format == "json":
        found = [layout_json(c.layout, c.memory, c.time, budget) for c in (*search.fitting, *search.too_big)]
        print(json.dumps({"layouts": found, "illegal": dict(search.illegal)}, indent=2))
    else:
        print(format_search(search, budget))
    best = (search.fitting or search.too_big)[:LISTED]
    if best:
        bars = [(layout_words(found.layout), found.memory.worst.items) for found in best]
        _draw_memory(run_dir, bars, f"{config.model.name} on {num_gpus} x {config.hardware.name}: worst rank", budget)
    return 0


def _draw_memory(run_dir: Path, bars: list, title: str, budget: float) -> None:
    path = run_dir / MEMORY_PNG
    draw_bars(bars, path, title=title, limit=budget)
    logger.info(f"memory as bars: {path}")


def _of_one_prompt(layout: Layout, memory: MemoryPlan) -> StageMemory:
    """The worst stage with the state of one prompt, as a dry run has it."""
    state = dataclasses.replace(layout.config.state, reuse_steps=0)
    one = dataclasses.replace(layout, config=dataclasses.replace(layout.config, state=state))
    return plan_memory(one, num_groups=1).stages[memory.worst.pp_rank]


def plan_layout(config: Config, num_gpus: int, run_dir: Path) -> int:
    """The layout of `parallel`."""
    check_world_size(config, num_gpus)
    check_experts(config)
    check_layout(config)
    layout = Layout(config, Workload.of(config), num_gpus)
    memory = plan_memory(layout)
    step, budget = plan_time(layout, memory), device_bytes(config, num_gpus)
    as_json = config.format == "json"
    if not as_json:
        parts = (
            describe(layout),
            format_memory(memory, budget, ranks_of_node(layout)),
            format_time(step),
        )
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
        print("\n" + compare_dry_run(_of_one_prompt(layout, memory), result, seconds))
    bars = [(f"ranks {ranks_of(stage)}", stage.items) for stage in memory.stages]
    _draw_memory(run_dir, bars, describe(layout).split(", gradient")[0], budget)
    if config.plan.draw:
        path = run_dir / SCHEDULE_PNG
        draw_png(step.report, path, title=layout_words(layout), unit="s")
        if not as_json:
            print(f"\n{draw_text(step.report)}\n{legend(step.report)}; in seconds")
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
    if config.plan.search:
        for key in ("dry_run", "draw"):
            if getattr(config.plan, key):
                raise RefusedError(f"plan.{key}=true is for one layout, got plan.search=true; ask for one of the two.")
        if config.plan.num_gpus is None:
            raise RefusedError("plan.search=true needs the number of GPUs, got plan.num_gpus=null; set num_gpus=N.")
    run_dir = make_folder("run_dir", config.run_dir)
    num_gpus = num_gpus_of(config)
    for warning in keys_without_effect(_some_layout(config, num_gpus), config.response_length):
        logger.warning(warning)
    if config.plan.search:
        for word in overrides:
            if word.startswith("parallel"):
                logger.warning(f"{word} has no effect: plan.search=true goes over all layouts.")
        return plan_search(config, num_gpus, run_dir)
    return plan_layout(config, num_gpus, run_dir)
