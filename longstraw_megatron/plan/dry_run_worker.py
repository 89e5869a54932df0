"""The process of a dry run, whose argument is the process that began it.

stdin: the job of `dry_run`, JSON; last line of stdout: its result, or what is refused.
"""

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from contextlib import ExitStack

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

from longstraw_megatron.config import Config, build_config
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.functional.objective import BranchLoss
from longstraw_megatron.mcore.engine import Engine
from longstraw_megatron.mcore.group_work import GroupWork
from longstraw_megatron.mcore.learner import Learner
from longstraw_megatron.mcore.parallel import ParallelContext
from longstraw_megatron.mcore.patching import applied
from longstraw_megatron.mcore.session import build_trained, learner_options, make_link
from longstraw_megatron.plan.counted import counted_buffers, counted_build, counted_host, counted_state
from longstraw_megatron.plan.dry_run import DryRunResult, Phase
from longstraw_megatron.plan.fake_prefix import fill_stage_inputs, fill_state, make_grads
from longstraw_megatron.plan.fake_ranks import init_fake_ranks, no_memory
from longstraw_megatron.plan.items import Item
from longstraw_megatron.plan.live import LiveMemory
from longstraw_megatron.plan.shortcuts import few_hops, few_pages, short_loops
from longstraw_megatron.plan.stand_ins import cpu_kernels, even_routing, gpu_kernels
from longstraw_megatron.plan.workload import Workload
from longstraw_megatron.schedule import Action, Description, Op, incoming, outgoing

NO_SEGMENT = -1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# the formula's names (plan/memory.py); what a replay takes most is its backward
PHASES = {
    Op.PREFILL: "prefill",
    Op.BLOCK_PREFILL: "block prefill",
    Op.FORWARD: "replay forward",
    Op.BACKWARD: "replay",
    Op.BLOCK_BACKWARD: "block walk",
    Op.PROMPT_BACKWARD: "walk",
}


class Recorder:
    """Closes phases: the peak since the last one, with its items."""

    def __init__(self, live: LiveMemory):
        self.live = live
        self.phases: list[Phase] = []
        self._start, self._ops = time.perf_counter(), 0

    def close(self, name: str) -> None:
        live, now = self.live, time.perf_counter()
        phase = Phase(
            name=name,
            peak=live.peak,
            items=live.peak_items,
            host={item: size for item, size in live.host.items() if size},
            left=live.items[Item.GRAPH],
            seconds=round(now - self._start, 3),
            num_ops=live.num_ops - self._ops,
        )
        self.phases.append(phase)
        self._start, self._ops = now, live.num_ops
        live.reset_peak()


def _count_optimizer(optimizer: MegatronOptimizer, live: LiveMemory) -> list[Tensor]:
    """Both moments, which the first step makes, and main weights, where they lie. Returns the moments."""
    moments = []
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        parts, hosted = [inner.optimizer], []
        if isinstance(inner.optimizer, HybridDeviceOptimizer):
            parts, hosted = inner.optimizer.sub_optimizers, inner.optimizer.cpu_optimizers
            live.recount(inner.optimizer.cpu_copys_map_gpu_param, Item.OPTIMIZER, on_host=True)
        for part in parts:
            on_host = any(part is host for host in hosted)
            params = [param for group in part.param_groups for param in group["params"]]
            if on_host:
                live.recount(params, Item.OPTIMIZER, on_host=True)
            with live.counted_as(Item.OPTIMIZER, on_host=on_host):
                moments += [torch.empty_like(param) for param in params for _ in range(2)]
    return moments


def build_learner(config: Config, context: ParallelContext, recorder: Recorder) -> tuple[Learner, tuple]:
    """The trained model as a run makes it: weights, DDP, optimizer; and what keeps the optimizer alive."""
    live = recorder.live
    chunks, optimizer = build_trained(config, context, fill=False)
    moments = _count_optimizer(optimizer, live)
    learner = Learner(chunks, context, learner_options(config, context), link=make_link(context))
    recorder.close("build")
    return learner, (optimizer, moments)


def _actions(description: Description, pp_rank: int, last: int) -> list[Action]:
    """PREFILL of the first segment and of `last`, as many FORWARDs as may live at once, their BACKWARDs, the walk.

    A microbatch's earlier blocks are all scored; the last of them, behind which its path is longest, is walked back.
    """
    stages = description.stages_of(pp_rank)
    shape = description.groups[0]
    starts = shape.block_starts
    segments = sorted({0, last}) if last != NO_SEGMENT else []
    computes = [Action(Op.PREFILL, 0, unit, stage) for unit in segments for stage in stages]
    live = {stage: range(min(description.max_live_graphs(stage), shape.num_microbatches)) for stage in stages}
    for stage in stages:
        for unit in live[stage]:
            computes += [Action(Op.BLOCK_PREFILL, 0, block, stage) for block in range(starts[unit], starts[unit + 1])]
            computes.append(Action(Op.FORWARD, 0, unit, stage))
    for stage in reversed(stages):
        for unit in live[stage]:
            computes.append(Action(Op.BACKWARD, 0, unit, stage))
            if starts[unit] < starts[unit + 1]:
                computes.append(Action(Op.BLOCK_BACKWARD, 0, starts[unit + 1] - 1, stage))
    if description.exact and last != NO_SEGMENT:
        computes += [Action(Op.PROMPT_BACKWARD, 0, last, stage) for stage in reversed(stages)]
    actions = []
    for compute in computes:
        before, behind = incoming(compute, description.num_stages), outgoing(compute, description.num_stages)
        actions += [action for action in (before, compute, behind) if action is not None]
    return actions


def _end_path(engine: Engine, work: GroupWork, action: Action, pp_size: int) -> None:
    """Forget a branch's path, of whose blocks only the last was walked."""
    microbatch, _ = work.shape.block_of(action.unit)
    for block in range(work.shape.block_starts[microbatch], action.unit):
        engine.kept_blocks.pop((0, block, action.stage), None)
    work.drop_path(microbatch, action.stage // pp_size)


def _last_long_segment(work: GroupWork) -> int:
    """The last segment with as many rows as any: behind it there may be a shorter one."""
    rows = [layout.rows for layout in work.segment_layouts]
    return max((index for index, count in enumerate(rows) if count == max(rows)), default=NO_SEGMENT)


def run_phases(learner: Learner, workload: Workload, recorder: Recorder) -> None:
    """The engine on the first and the last long prompt segment, and on as many microbatches as live at once."""
    live, engine, groups = recorder.live, learner.engine, learner.context.groups
    # every data-parallel rank has one
    _, (work, *_), _ = learner.prepare([workload.group()] * groups.dp.size(), learner.options.state, forward_only=False)
    last = _last_long_segment(work)
    description = Description(
        groups=(work.shape,),
        pp_size=groups.pp.size(),
        vpp_size=len(learner.chunks),
        exact=learner.options.state.exact,
    )

    def progress(action: Action) -> None:
        chunk = action.stage // groups.pp.size()
        state = work.states[chunk]
        for path in (state, *(path for (_, place), path in work.paths.items() if place == chunk)):
            live.recount(path.experts.values(), Item.STATE)
        live.recount((*engine.kept_inputs.values(), *engine.kept_blocks.values()), Item.STAGE_INPUTS)
        is_first = action.op is Op.PREFILL and action.unit == 0 and last > 0
        recorder.close("first prefill" if is_first else PHASES[action.op])
        missing = range(1, last) if is_first else range(last + 1, work.num_segments)
        if action.op is Op.PREFILL and missing:
            fill_state(state, work, missing, live)
            fill_stage_inputs(engine, action.stage, work, missing, live)
            recorder.close("state")
        path = work.paths.get((action.unit, chunk))
        if action.op is Op.BACKWARD and path is not None:
            make_grads(path)
        elif action.op is Op.BLOCK_BACKWARD:
            _end_path(engine, work, action, groups.pp.size())

    def objective(place: int, branch: int, logprobs: Tensor) -> BranchLoss:
        return BranchLoss(loss=logprobs.sum(), grad_logprobs=torch.empty_like(logprobs), stats={})

    engine.progress = progress
    engine.run(_actions(description, groups.pp.rank(), last), [work], objective=objective)


def run_dry(config: Config, workload: Workload, *, rank: int, world_size: int) -> DryRunResult:
    """Run rank `rank` of `world_size` on meta tensors. This process is good for nothing else afterwards."""
    live = LiveMemory(host_is_device=config.device == "cpu")
    recorder = Recorder(live)
    with ExitStack() as stack:
        context = init_fake_ranks(config, rank, world_size)
        patches = [*no_memory(), *even_routing(), *few_pages(), *few_hops()]
        patches += [
            *counted_build(live, config.optimizer),
            *counted_state(live),
            *counted_buffers(live),
            *counted_host(live),
        ]
        patches += [*gpu_kernels(), *short_loops()] if config.device == "cuda" else cpu_kernels()
        stack.enter_context(applied(patches))
        stack.enter_context(live)
        learner, _optimizer = build_learner(config, context, recorder)
        run_phases(learner, workload, recorder)
    return DryRunResult(rank, tuple(recorder.phases))


def resolved(config: Config) -> Config:
    """`device` and `precision` without `auto`: what is planned runs on a GPU unless it says otherwise."""
    device = "cuda" if config.device == "auto" else config.device
    precision = ("bf16" if device == "cuda" else "fp32") if config.precision == "auto" else config.precision
    return dataclasses.replace(config, device=device, precision=precision)


def end_with_parent(parent: int) -> None:
    """Linux: this process is killed when `parent`, which started it, is gone, however that ended.

    It may be gone by now: the imports of this module take seconds.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    end_with_parent(int(sys.argv[1]))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    job = json.loads(sys.stdin.read())
    workload = Workload(job["prompt_length"], tuple(job["response_lengths"]))
    try:
        config = resolved(build_config(job["config"]))
        result = dataclasses.asdict(run_dry(config, workload, rank=job["rank"], world_size=job["world_size"]))
    except RefusedError as error:
        result = {"refused": str(error)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
