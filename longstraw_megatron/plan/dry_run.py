"""A dry run: one rank of the real model in the real layout, on fake tensors; `python -m longstraw_megatron.plan.dry_run`.

The product's own model, DDP, optimizer, engine, layers and state run at the prompt's last segment, where the prefix is
longest, and every storage is counted by item. Nothing is computed and no memory of that size is taken.

It has a process of its own, which sees no GPU: Megatron caches tensors and process groups for the life of a process,
and the caches of a dry run are fake. stdin: {"config", "rank", "world_size"} as JSON; last line of stdout: the result.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longstraw_megatron.config import Config, build_config
from longstraw_megatron.functional.objective import BranchLoss
from longstraw_megatron.mcore.cpu import enable_cpu_runtime, fake_rng
from longstraw_megatron.mcore.group_work import GroupWork, cut_group
from longstraw_megatron.mcore.learner import Learner
from longstraw_megatron.mcore.model import BuildOptions, build_model, wrap_ddp
from longstraw_megatron.mcore.optimizer import build_optimizer
from longstraw_megatron.mcore.parallel import ParallelContext, init_parallel
from longstraw_megatron.mcore.patching import Patch, applied
from longstraw_megatron.mcore.session import learner_options, make_link
from longstraw_megatron.plan.live import ACTIVATIONS, LiveMemory
from longstraw_megatron.plan.stand_ins import even_routing, gpu_kernels, short_loops
from longstraw_megatron.plan.workload import Workload
from longstraw_megatron.schedule import Action, Description, GroupShape, Op, incoming, outgoing
from longstraw_megatron.state import BoundaryStates, PagedRows, PrefixState

MAX_PAGES = 2  # of the pages of a table that is full, how many attention walks; the others only take memory
WITHOUT_GRADIENT = ("index_key",)


@dataclass
class Phase:
    """What lived at the peak of a phase, bytes by item, and the activations that were left behind it."""

    name: str
    peak: int
    items: dict[str, int]
    left: int
    seconds: float
    num_ops: int


@dataclass
class DryRun:
    """The phases of one rank in order. Bytes are those of tensors: no allocator, no context, no NCCL."""

    rank: int
    phases: list[Phase] = field(default_factory=list)

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)


class _Recorder:
    """Closes phases: the peak since the last one, with its items."""

    def __init__(self, live: LiveMemory, rank: int):
        self.live = live
        self.result = DryRun(rank)
        self._start, self._ops = time.perf_counter(), 0

    def close(self, name: str) -> None:
        live, now = self.live, time.perf_counter()
        left = live.items[ACTIVATIONS]
        num_ops = live.num_ops - self._ops
        phase = Phase(name, live.peak, dict(live.peak_items), left, now - self._start, num_ops)
        self.result.phases.append(phase)
        self._start, self._ops = now, live.num_ops
        live.reset_peak()


def init_fake_ranks(config: Config, rank: int, world_size: int) -> ParallelContext:
    """Process groups of `world_size` ranks of which only `rank` exists; its collectives do nothing."""
    import torch.distributed._tools.fake_collectives  # noqa: F401  gives the collectives' operators fake forms
    from torch.testing._internal.distributed.fake_pg import FakeStore

    enable_cpu_runtime()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False,
    )
    return init_parallel(parallel, device=torch.device("cpu"), seed=config.seed, timeout_s=config.dist.timeout_s)


def _build(config: Config, context: ParallelContext, recorder: _Recorder) -> Learner:
    """The trained model as a run makes it: weights, DDP, optimizer with its states."""
    live = recorder.live
    with live.tag("weights"):
        chunks = build_model(config.model.hf_config, BuildOptions(config.precision, config.recompute), context)
    if config.device == "cuda":
        for chunk in chunks:
            for module in chunk.modules():
                if hasattr(module, "kernel"):
                    module.kernel = "fla"
    distributed = context.groups.dp_cp.size() > 1
    with live.tag("weight_gradients"):
        chunks = wrap_ddp(chunks, context, use_distributed_optimizer=distributed)
    live.retag((p.data for chunk in chunks for p in chunk.parameters()), "weights")
    with live.tag("optimizer"):
        optimizer = build_optimizer(
            config.optimizer, chunks, context, precision=config.precision, use_distributed_optimizer=distributed
        )
        states = [
            torch.empty_like(parameter)
            for inner in getattr(optimizer, "chained_optimizers", [optimizer])
            for group in inner.optimizer.param_groups
            for parameter in group["params"]
            for _ in range(2)
        ]
    learner = Learner(chunks, context, learner_options(config, context), link=make_link(context))
    learner.kept_for_the_count = states
    recorder.close("build")
    return learner


def _tables(state: PrefixState) -> Iterator[tuple[str, PagedRows]]:
    for (kind, _), rows in state._rows.items():
        yield kind, rows


def _tag_state(state: PrefixState, live: LiveMemory) -> None:
    """Count what lies in a state under its item."""
    for _, rows in _tables(state):
        live.retag((tensor for page in rows._pages for tensor in page.tensors), "prefix_state")
    for boundaries in state._boundaries.values():
        live.retag((value for values in boundaries._values.values() for value in values), "boundaries")
    live.retag(state.experts.values(), "prefix_state")


def _extend_state(work: GroupWork, chunk: int, live: LiveMemory) -> list:
    """After the first segment: what all segments but the last would have left. Returns what nobody walks but lives."""
    state, last = work.states[chunk], work.num_segments - 1
    unwalked = []
    for kind, rows in _tables(state):
        with live.tag("prefix_state"):
            missing = work.prefix_rows[last] - rows.num_rows
            rows.append(*(t[:1].expand(missing, *t.shape[1:]) for t in rows._pages[0].tensors))
        if state.exact and kind not in WITHOUT_GRADIENT:
            for page in rows._pages:
                rows._accumulators(page)
        if len(rows._pages) > MAX_PAGES:
            unwalked += rows._pages[1 : 1 - MAX_PAGES]
            rows._pages = [rows._pages[0], *rows._pages[1 - MAX_PAGES :]]
    with live.tag("boundaries"):
        for boundaries in state._boundaries.values():
            for boundary in range(2, last + 1):
                boundaries.put(boundary, *(value.clone() for value in boundaries.get(boundary - 1)))
    with live.tag("prefix_state"):
        for layer_number, _ in list(state.experts):
            for index in range(1, last):
                state.experts[layer_number, index] = state.experts[layer_number, 0].clone()
    if state.layouts:
        for index in range(1, last):
            state.layouts[index] = work.starts[index], work.segment_layouts[index]
    return unwalked


def _sequence(description: Description, pp_rank: int, num_segments: int) -> list[Action]:
    """First and last PREFILL, as many FORWARDs as may live at once, their BACKWARDs, the last PROMPT_BACKWARD."""
    stages, last = description.stages_of(pp_rank), num_segments - 1
    num_microbatches = description.groups[0].num_microbatches
    computes = [Action(Op.PREFILL, 0, unit, stage) for unit in sorted({0, last} - {-1}) for stage in stages]
    live = {stage: range(min(description.max_live_graphs(stage), num_microbatches)) for stage in stages}
    computes += [Action(Op.FORWARD, 0, unit, stage) for stage in stages for unit in live[stage]]
    computes += [Action(Op.BACKWARD, 0, unit, stage) for stage in reversed(stages) for unit in live[stage]]
    if description.exact and num_segments:
        computes += [Action(Op.PROMPT_BACKWARD, 0, last, stage) for stage in reversed(stages)]
    actions = []
    for compute in computes:
        transfers = incoming(compute, description.num_stages), outgoing(compute, description.num_stages)
        actions += [action for action in (transfers[0], compute, transfers[1]) if action is not None]
    return actions


def _patches(live: LiveMemory) -> list[Patch]:
    """What states make in the middle of a phase is counted under its item; modules stay where they are."""

    def tagged(method, name):
        def wrapper(self, *args):
            with live.tag(name):
                return method(self, *args)

        return wrapper

    reason = "bytes by item"
    return [
        Patch(torch.nn.Module, "to", lambda module, *args: module, "swaps parameters, which fake ones refuse"),
        Patch(PagedRows, "_accumulators", tagged(PagedRows._accumulators, "state_gradients"), reason),
        Patch(BoundaryStates, "add_grad", tagged(BoundaryStates.add_grad, "state_gradients"), reason),
    ]


def _run(config: Config, workload: Workload, context: ParallelContext, recorder: _Recorder) -> None:
    live, groups = recorder.live, context.groups
    learner = _build(config, context, recorder)
    options, engine = learner.options, learner.engine
    group = workload.group()
    cut = cut_group(group, options.cut, cp_size=groups.cp.size())
    work = GroupWork(
        group,
        cut,
        options.state,
        cp_rank=groups.cp.rank(),
        num_chunks=len(learner.chunks),
        device=context.device,
        traffic=learner.traffic,
    )
    description = Description(
        groups=(GroupShape(work.num_segments, work.num_microbatches),),
        pp_size=groups.pp.size(),
        vpp_size=len(learner.chunks),
        exact=options.state.exact,
    )
    last, num_stages = work.num_segments - 1, description.num_stages
    unwalked = []

    def progress(action: Action) -> None:
        chunk = action.stage // groups.pp.size()
        _tag_state(work.states[chunk], live)
        live.retag(engine._kept.values(), "stage_inputs")
        if action.op is Op.PREFILL and action.unit == 0 and last > 0:
            recorder.close("first prefill")
            unwalked.extend(_extend_state(work, chunk, live))
            with live.tag("stage_inputs"):
                for index in range(1, last):
                    if (0, 0, action.stage) in engine._kept:
                        kept = engine._kept[0, 0, action.stage]
                        engine._kept[0, index, action.stage] = torch.empty_like(kept)
            recorder.close("state")
        elif action.op is Op.FORWARD:
            recorder.close(f"replay forward {action.unit}")
        else:
            recorder.close(action.op.name.lower().replace("_", " "))

    def objective(place: int, branch: int, logprobs: Tensor) -> BranchLoss:
        return BranchLoss(loss=logprobs.sum(), grad_logprobs=torch.empty_like(logprobs), stats={})

    engine.progress = progress
    engine.run(_sequence(description, groups.pp.rank(), work.num_segments), [work], objective=objective)
    assert num_stages == description.num_stages


def dry_run(config: Config, workload: Workload, *, rank: int, world_size: int) -> DryRun:
    """Run rank `rank` of `world_size` on fake tensors. This process is good for nothing else afterwards."""
    live = LiveMemory()
    recorder = _Recorder(live, rank)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(fake_rng())
        patches = [*even_routing(), *_patches(live)]
        if config.device == "cuda":
            patches += [*gpu_kernels(), *short_loops()]
        context = init_fake_ranks(config, rank, world_size)
        stack.enter_context(applied(patches))
        stack.enter_context(live)
        _run(config, workload, context, recorder)
    return recorder.result


def main() -> int:
    job = json.loads(sys.stdin.read())
    config = build_config(job["config"])
    result = dry_run(config, Workload.of(config), rank=job["rank"], world_size=job["world_size"])
    print(json.dumps(dataclasses.asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
