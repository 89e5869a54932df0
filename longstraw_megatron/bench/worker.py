"""One method in a process of its own: `python -m longstraw_megatron.bench.worker METHOD FOLDER KEY=VALUE ...`.

Every rank writes FOLDER/<process id>.json: its `RankReport`, or the reason why there is none. A run is the gradient of
one step; there is no optimizer step, so that every repetition computes the same.
"""

import ctypes
import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.bench.workload import DENSE_METHODS, make_groups
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import Config, resolve_auto
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.dense import dense_group
from longstraw_megatron.mcore.monitor import PhaseStats
from longstraw_megatron.mcore.parallel import init_parallel, pick_device
from longstraw_megatron.mcore.session import build_trainer
from longstraw_megatron.mcore.trainer import Trainer
from longstraw_megatron.schedule.actions import Action, Op

PHASES = {
    Op.PREFILL: "prefill",
    Op.FORWARD: "replay",
    Op.BLOCK_PREFILL: "replay",
    Op.BACKWARD: "branch_backward",
    Op.BLOCK_BACKWARD: "branch_backward",
    Op.PROMPT_BACKWARD: "prompt_backward",
}
# mallopt's (M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD), bytes: where glibc's own rule ends up with large tensors.
USUAL_MALLOC = ((-1, 64 << 20), (-2, 128 << 10), (-3, 32 << 20))
WARM_TOKENS = 64  # of prompt behind the first segment, and at most so many of a response, in the run that warms up


@dataclass
class PhaseReport:
    """A phase: time of the fastest repetition, memory and bytes of the first one."""

    seconds: float
    tokens: int
    units: int  # segments or microbatches
    peak_bytes: int  # over the loaded model
    sent_bytes: int  # by this rank, for context parallelism


@dataclass
class RankReport:
    """What one rank measured. Peaks are over the loaded model: weights, their gradients, and a warm process."""

    rank: int
    seconds: list[float]  # of each repetition
    cpu_seconds: list[float]  # processor time of all threads
    loaded_bytes: int
    peak_bytes: int
    state_bytes: dict[str, int]  # prefix state by item, when there was most of it
    loss: float
    grad_norm: float
    phases: dict[str, PhaseReport]
    sent_by_purpose: dict[str, int]  # bytes of one repetition; between pipeline stages too, which are in no phase


class Watch:
    """Follows a run: prefix state by item when it is largest, bytes sent by phase."""

    def __init__(self):
        self.trainer: Trainer | None = None
        self.state: dict[str, int] = {}
        self.sent: Counter[str] = Counter()
        self._sent_before = 0

    def __call__(self, action: Action) -> None:
        learner = self.trainer.learner
        state = learner.engine.state_bytes()
        if sum(state.values()) > sum(self.state.values()):
            self.state = state
        self.sent[PHASES[action.op]] += learner.traffic.total - self._sent_before
        self._sent_before = learner.traffic.total

    def begin(self, label: str, totals: dict[Op, int]) -> None:
        """What a pass will do is not watched."""

    def restart(self) -> None:
        """A new repetition; what was sent between runs is in no phase."""
        self.sent.clear()
        self._sent_before = self.trainer.learner.traffic.total


@dataclass
class Repetition:
    """One gradient: how long it took, and what it took by phase."""

    seconds: float
    cpu_seconds: float
    phases: dict[str, PhaseStats]
    sent_by_phase: Counter[str]
    sent_by_purpose: Counter[str]
    loss: float

    @classmethod
    def of(cls, trainer: Trainer, watch: Watch, groups: list[PromptGroup]) -> "Repetition":
        learner = trainer.learner
        learner.monitor.take()
        dist.barrier()
        watch.restart()
        sent = learner.sent
        start, cpu_start = time.perf_counter(), time.process_time()
        stats, _ = learner.compute_gradients(groups)
        return cls(
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu_start,
            phases=learner.monitor.take(),
            sent_by_phase=watch.sent.copy(),
            sent_by_purpose=learner.sent - sent,
            loss=float(stats["loss"]),
        )


def method_config(config: Config, method: str) -> Config:
    """The run's keys for one method: a dense pass holds one whole sequence at a time."""
    if method in DENSE_METHODS:
        recompute = "full" if method == "dense_recompute" else "none"
        whole = {"branches_per_microbatch": 1, "response_block": None}
        return dataclasses.replace(config, gradient="detached", recompute=recompute, **whole)
    return dataclasses.replace(config, gradient=method)


def _glibc(function: str, *arguments: int) -> None:
    """Call the C library's allocator, where it is glibc's."""
    found = getattr(ctypes.CDLL(None), function, None)
    if found is not None:
        found(*arguments)


def resident_bytes(device: torch.device) -> int:
    """What is in use now, freed memory handed back first: the allocator's on CUDA, the process's on a CPU."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    _glibc("malloc_trim", 0)
    return psutil.Process().memory_info().rss


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory, as it does in any other process; launch.MALLOC forbade it."""
    for parameter, num_bytes in USUAL_MALLOC:
        _glibc("mallopt", parameter, num_bytes)


def shortened(groups: list[PromptGroup], length: int) -> list[PromptGroup]:
    """One branch of each group behind at most `length` prompt tokens: it touches all code and little memory."""
    return [
        PromptGroup(
            group.group_id,
            group.prompt_tokens[:length],
            (Branch(group.branches[0].tokens[:WARM_TOKENS], reward=0.0, advantage=1.0),),
        )
        for group in groups
    ]


def grad_norm(trainer: Trainer) -> float:
    """Norm of the whole gradient, as the optimizer clips by it."""
    trainer.optimizer.prepare_grads()
    return float(trainer.optimizer.get_grad_norm())


def measure(config: Config, method: str) -> RankReport:
    """Build the model, run `method` once for its memory and `bench.repeats` times for its time, on every rank."""
    device = pick_device(config.device)
    context = init_parallel(config.parallel, device=device, seed=config.seed, timeout_s=config.dist.timeout_s)
    groups = make_groups(config, context.groups.dp.size())
    warm = shortened(groups, config.segment_length + WARM_TOKENS)
    if method in DENSE_METHODS:
        groups, warm = [dense_group(group) for group in groups], [dense_group(group) for group in warm]
    watch = Watch()
    trainer = watch.trainer = build_trainer(method_config(config, method), groups, context, progress=watch)
    trainer.learner.compute_gradients(warm)
    loaded = resident_bytes(device)
    first = Repetition.of(trainer, watch, groups)
    keep_freed_memory()
    timed = [Repetition.of(trainer, watch, groups) for _ in range(config.bench.repeats)]
    fastest = min(timed, key=lambda repetition: repetition.seconds)
    phases = {
        name: PhaseReport(
            seconds=phase.seconds,
            tokens=phase.tokens,
            units=phase.count,
            peak_bytes=first.phases[name].peak_bytes - loaded,
            sent_bytes=first.sent_by_phase[name],
        )
        for name, phase in fastest.phases.items()
    }
    return RankReport(
        rank=context.global_rank,
        seconds=[repetition.seconds for repetition in timed],
        cpu_seconds=[repetition.cpu_seconds for repetition in timed],
        loaded_bytes=loaded,
        peak_bytes=max(phase.peak_bytes for phase in phases.values()),
        state_bytes=watch.state,
        loss=first.loss,
        grad_norm=grad_norm(trainer),
        phases=phases,
        sent_by_purpose=dict(first.sent_by_purpose),
    )


def main(argv: list[str]) -> int:
    """Exit code: 0 measured, 2 refused, 1 failed."""
    method, folder, *overrides = argv
    outcome: dict = {"report": None, "error": None, "is_refusal": False}
    try:
        config = resolve_auto(load_config(overrides), cuda_available=torch.cuda.is_available())
        outcome["report"] = dataclasses.asdict(measure(config, method))
        dist.destroy_process_group()
    except RefusedError as error:
        outcome |= {"error": str(error), "is_refusal": True}
    except torch.OutOfMemoryError as error:
        outcome["error"] = f"out of memory: {str(error).splitlines()[0]}"
    except Exception as error:
        traceback.print_exc()
        outcome["error"] = f"{type(error).__name__}: {error}"
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(outcome), encoding="utf-8")
    if outcome["error"] is None:
        return 0
    return 2 if outcome["is_refusal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
