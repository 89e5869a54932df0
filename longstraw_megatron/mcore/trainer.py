"""A run: rollouts through optimizer steps, with what it writes on the way.

Knows neither Hydra nor Weights & Biases: `train.py` hands in the settings and something that takes metrics.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from longstraw_megatron.batch import PromptGroup
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.learner import Learner, Logprobs
from longstraw_megatron.mcore.optimizer import drop_grad_copies
from longstraw_megatron.mcore.weights import export_grads, save_hf_weights

StepCallback = Callable[[int, dict[str, float]], None]


def steps_of(num_groups: int, groups_per_step: int | str) -> list[range]:
    """Indices of the groups of each optimizer step of one pass over the file."""
    size = num_groups if groups_per_step == "all" else int(groups_per_step)
    if size > num_groups:
        raise RefusedError(
            f"groups_per_step is {size}, but the rollouts hold {num_groups} groups; use groups_per_step=all."
        )
    return [range(start, min(start + size, num_groups)) for start in range(0, num_groups, size)]


def pick(logprobs: Logprobs, indices: Sequence[int]) -> Logprobs:
    """The logprobs of some groups, renumbered by their place in `indices`."""
    places = {index: place for place, index in enumerate(indices)}
    return {(places[g], b): values for (g, b), values in logprobs.items() if g in places}


@dataclass(frozen=True)
class TrainerOptions:
    max_steps: int
    groups_per_step: int | str = "all"
    export_grads: str | None = None
    export_logprobs: str | None = None
    export_hf: str | None = None
    save_every: int | None = None


@dataclass
class Trainer:
    """Optimizer steps over `groups`; whole passes over the file are repeated until `max_steps`.

    `ref_logprobs` and `old_logprobs` are keyed by (index in `groups`, branch). Old logprobs that the file lacks are
    those of the policy before the first step: taken from the first step's own replay where it covers the whole file,
    scored up front otherwise.
    """

    learner: Learner
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    groups: list[PromptGroup]
    options: TrainerOptions
    hf_config: dict = field(default_factory=dict)
    hf_path: str | None = None
    ref_logprobs: Logprobs = field(default_factory=dict)
    old_logprobs: Logprobs = field(default_factory=dict)
    first_step: int = 0
    save: Callable[[int], None] | None = None  # called after a step that is to be kept

    def run(self, on_step: StepCallback) -> None:
        """Train from `first_step` to `max_steps`; `on_step(step, metrics)` on every rank, counted from 1."""
        steps = steps_of(len(self.groups), self.options.groups_per_step)
        if self.first_step == 0:
            self._score_old(steps)
        for step in range(self.first_step, self.options.max_steps):
            indices = steps[step % len(steps)]
            metrics = self.train_step(step, indices)
            on_step(step + 1, metrics)
            done, every = step + 1, self.options.save_every
            if self.save is not None and (done == self.options.max_steps or (every and done % every == 0)):
                self.save(done)
        if self.options.export_hf:
            save_hf_weights(
                self.learner.engine.chunks,
                self.options.export_hf,
                groups=self.learner.context.groups,
                hf_config=self.hf_config,
                source_hf_path=self.hf_path,
            )

    def train_step(self, step: int, indices: Sequence[int]) -> dict[str, float]:
        """Gradients of one global batch, then the update; metrics under their public names."""
        start = time.perf_counter()
        learner = self.learner
        sent = learner.sent
        groups = [self.groups[index] for index in indices]
        stats, logprobs = learner.compute_gradients(
            groups,
            old_logprobs=pick(self.old_logprobs, indices),
            ref_logprobs=pick(self.ref_logprobs, indices),
        )
        if step == 0:
            self._write_first(groups, logprobs)
        if self._keeps_first_logprobs(step, indices):
            self.old_logprobs = self._missing_old(logprobs, indices)
        with learner.monitor.phase("optimizer"):
            success, grad_norm, _ = self.optimizer.step()
            drop_grad_copies(self.optimizer)
        lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=1)
        seconds = time.perf_counter() - start
        tokens = sum(len(group.prompt_tokens) + sum(group.response_lengths) for group in groups)
        return {
            **{f"train/{name}": value for name, value in stats.items()},
            "train/grad_norm": float(grad_norm),
            "train/lr": float(lr),
            "train/updated": float(success),
            "perf/step_seconds": seconds,
            "perf/tokens": float(tokens),
            "perf/tokens_per_second": tokens / seconds,
            **learner.state_metrics,
            **self._phase_metrics(),
            **_traffic_metrics(learner.sent - sent),
        }

    def _phase_metrics(self) -> dict[str, float]:
        metrics = {}
        for name, phase in self.learner.monitor.take().items():
            metrics[f"perf/{name}_seconds"] = phase.seconds
            metrics[f"perf/{name}_peak_gb"] = phase.peak_bytes / 1e9
            if phase.tokens:
                metrics[f"perf/{name}_tokens"] = float(phase.tokens)
        return metrics

    def _lacks_old(self, indices: Sequence[int]) -> bool:
        return any(branch.old_logprobs is None for i in indices for branch in self.groups[i].branches)

    def _missing_old(self, logprobs: Logprobs, indices: Sequence[int]) -> Logprobs:
        return {
            (indices[g], b): values
            for (g, b), values in logprobs.items()
            if self.groups[indices[g]].branches[b].old_logprobs is None
        }

    @property
    def _horizon(self) -> int:
        """Steps that need old logprobs; a run that is saved may be resumed for more than its own."""
        return self.options.max_steps if self.save is None else sys.maxsize

    def _keeps_first_logprobs(self, step: int, indices: Sequence[int]) -> bool:
        whole_file = len(indices) == len(self.groups)
        return step == 0 and whole_file and self._horizon > 1 and self._lacks_old(indices)

    def _score_old(self, steps: list[range]) -> None:
        """Old logprobs of groups that are trained on after the first update."""
        if len(steps) == 1 or self._horizon == 1:
            return
        later = sorted({i for indices in steps[1 : self._horizon] for i in indices})
        if self._horizon > len(steps):
            later = list(range(len(self.groups)))
        if later and self._lacks_old(later):
            scored = self.learner.score([self.groups[i] for i in later])
            self.old_logprobs = self._missing_old(scored, later)
            self.learner.monitor.take()

    def _write_first(self, groups: list[PromptGroup], logprobs: Logprobs) -> None:
        """Exports of the first step, before any update."""
        if self.options.export_logprobs:
            if len(groups) < len(self.groups):
                logprobs = self.learner.score(self.groups)
            if dist.get_rank() == 0:
                write_logprobs(self.options.export_logprobs, self.groups, logprobs)
        if self.options.export_grads:
            export_grads(
                self.learner.chunks,
                self.options.export_grads,
                groups=self.learner.context.groups,
                hf_config=self.hf_config,
                hf_path=self.hf_path,
            )


def _traffic_metrics(sent: Counter[str]) -> dict[str, float]:
    """Bytes of a step that this rank sent, in all and by purpose."""
    by_purpose = {f"perf/sent_{purpose}_bytes": float(num) for purpose, num in sorted(sent.items())}
    return {"perf/sent_bytes": float(sent.total()), **by_purpose}


def write_logprobs(path: str, groups: Sequence[PromptGroup], logprobs: Logprobs) -> None:
    """JSONL, a line for each branch: group_id, branch, logprobs of its response tokens."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        for (g, b), values in sorted(logprobs.items()):
            line = {"group_id": groups[g].group_id, "branch": b, "logprobs": values.tolist()}
            file.write(json.dumps(line) + "\n")
