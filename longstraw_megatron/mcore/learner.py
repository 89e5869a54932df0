"""The GRPO transaction on one model: score, gradients of a global batch, update.

A global batch is a list of prompt groups. `compute_gradients` leaves the complete gradient in `main_grad`; `update`
clips and steps once. Losses are divided by global counts, so gradients are summed and never averaged.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from longstraw_megatron.batch import PromptGroup
from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.comm.pipeline import StageLink
from longstraw_megatron.errors import NonFiniteError
from longstraw_megatron.functional.advantages import group_advantages
from longstraw_megatron.functional.objective import BranchLoss, Denominators, branch_objective
from longstraw_megatron.functional.objective_config import ObjectiveConfig
from longstraw_megatron.functional.objective_stats import (
    MAXIMA,
    MINIMA,
    SUMS,
    empty_stats,
    merge_stats,
    summarize_stats,
)
from longstraw_megatron.mcore.engine import Engine
from longstraw_megatron.mcore.group_work import CutOptions, GroupWork, cut_group
from longstraw_megatron.mcore.lockstep import assign_step
from longstraw_megatron.mcore.model import moe_layer_numbers, unwrap
from longstraw_megatron.mcore.monitor import Monitor
from longstraw_megatron.mcore.parallel import ParallelContext
from longstraw_megatron.mcore.reductions import finalize_grads
from longstraw_megatron.mcore.reuse import PrefixReuse, drift_sample, logprob_change, loss_drift
from longstraw_megatron.mcore.step_plan import count_units, plan_step
from longstraw_megatron.schedule import Action, Op
from longstraw_megatron.state import PrefixState, StateOptions

Logprobs = dict[tuple[int, int], np.ndarray]  # (group, branch) -> [R] float64


@dataclass(frozen=True)
class LearnerOptions:
    cut: CutOptions
    state: StateOptions
    objective: ObjectiveConfig
    logprob_block: int | None = None
    max_live_prefixes: int = 1
    stage_inputs: str = "device"  # device | host
    reuse_steps: int = 0  # optimizer steps for which a detached prompt's state is kept beyond its own
    reuse_check_every: int | None = None  # of those, the ones in which its drift is measured


class Progress(Protocol):
    """Told what a pass will do, then of each action that is done."""

    def begin(self, label: str, totals: dict[Op, int]) -> None: ...

    def __call__(self, action: Action) -> None: ...


class Learner:
    """`chunks` are this rank's model chunks, in DDP to train and bare to score only."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        context: ParallelContext,
        options: LearnerOptions,
        *,
        link: StageLink | None = None,
        monitor: Monitor | None = None,
        progress: Progress | None = None,
    ):
        self.chunks = list(chunks)
        self.context = context
        self.options = options
        self.monitor = monitor or Monitor(context.device)
        self.progress = progress
        self.reuse = PrefixReuse(options.reuse_steps)
        self.state_metrics: dict[str, float] = {}  # of the last gradient, under their public names
        self.traffic = Traffic()  # bytes that context parallelism sent, over the learner's life
        self.engine = Engine(
            chunks,
            context,
            monitor=self.monitor,
            link=link,
            logprob_block=options.logprob_block,
            stage_inputs=options.stage_inputs,
            progress=progress,
        )

    @property
    def sent(self) -> Counter[str]:
        """Bytes that this rank sent so far, by purpose: to its context-parallel peers and to other stages."""
        link = self.engine.link
        return self.traffic.sent + (link.traffic.sent if link is not None else Counter())

    def score(self, groups: Sequence[PromptGroup]) -> Logprobs:
        """Logprobs of every response token under the current weights, without a graph, on every rank."""
        detached = replace(self.options.state, exact=False)
        indices, works, actions = self.prepare(groups, detached, forward_only=True)
        self.engine.run(actions, works)
        return self._share_logprobs(indices, works)

    def compute_gradients(
        self,
        groups: Sequence[PromptGroup],
        *,
        old_logprobs: Logprobs | None = None,
        ref_logprobs: Logprobs | None = None,
    ) -> tuple[dict[str, float], Logprobs]:
        """Gradient of the objective over all of `groups`, complete on every rank; statistics and logprobs.

        `old_logprobs` and `ref_logprobs` go before those that came with the rollouts; where neither has old ones, the
        ratio is taken to the current weights themselves. With a distributed optimizer a rank keeps the gradient of
        its own shard. Raises NonFiniteError before any weight changes.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                # a float32 optimizer leaves .grad as an alias of main_grad: autograd would add to it twice
                parameter.grad = None
        self.reuse.begin_step()
        kept = self.reuse.states_of(groups)
        indices, works, actions = self.prepare(groups, self.options.state, forward_only=False, kept=kept)
        objective = self._objective(groups, indices, old_logprobs or {}, ref_logprobs or {})
        result = self.engine.run(actions, works, objective=objective, keep_states=self.options.reuse_steps > 0)
        with self.monitor.phase("reduce"):
            finalize_grads(self.chunks, self.context)
        stats = self._reduce_stats(list(result.losses.values()))
        self._check_finite(groups)
        logprobs = self._share_logprobs(indices, works)
        self.reuse.keep(groups, works)
        if self.options.reuse_steps:
            self.state_metrics = self._measure_reuse(groups, logprobs, old_logprobs or {}, ref_logprobs or {})
        return summarize_stats(stats) | self._by_advantage(groups, logprobs), logprobs

    def prepare(
        self,
        groups: Sequence[PromptGroup],
        state: StateOptions,
        *,
        forward_only: bool,
        kept: list[list[PrefixState]] | None = None,
    ) -> tuple[list[int | None], list[GroupWork], list[Action]]:
        """What this rank does of a global batch: the groups that it runs (None: keeps step only), cut, and its plan."""
        pg, options = self.context.groups, self.options
        config = unwrap(self.chunks[0]).config
        step = assign_step(
            groups,
            dp_size=pg.dp.size(),
            cut=options.cut,
            cp_size=pg.cp.size(),
            exact=state.exact,
            recompute=config.recompute_granularity == "full",
            lockstep=config.num_moe_experts is not None and pg.tp_ep.size() > 1 and pg.dp.size() > 1,
        )[pg.dp.rank()]
        works = [
            GroupWork(
                None if index is None else groups[index],
                cut_group(None if index is None else groups[index], options.cut, cp_size=pg.cp.size(), rows=rows),
                state,
                cp_rank=pg.cp.rank(),
                tp_rank=pg.tp.rank(),
                tp_size=pg.tp.size(),
                num_chunks=len(self.chunks),
                device=self.context.device,
                traffic=self.traffic,
                moe_layers=moe_layer_numbers(config),
            )
            for index, rows in step
        ]
        for work, states in zip(works, kept or [], strict=False):
            work.take_states(states)
        step_plan = plan_step(
            works,
            config=config,
            pp_size=pg.pp.size(),
            vpp_size=len(self.chunks),
            exact=state.exact,
            forward_only=forward_only,
            max_live_prefixes=options.max_live_prefixes,
        )
        if self.engine.link is not None:
            self.engine.link.max_pending_sends = step_plan.max_pending_sends
        actions = step_plan.plan[pg.pp.rank()]
        if self.progress is not None:
            self.progress.begin("scoring" if forward_only else "", count_units(actions))
        return [index for index, _ in step], works, actions

    def _objective(self, groups, indices, old_logprobs: Logprobs, ref_logprobs: Logprobs):
        config = self.options.objective
        denominators = Denominators.of(
            [group.loss_tokens for group in groups], [group.response_lengths for group in groups]
        )
        advantages = self._advantages(groups)

        def as_tensor(array: np.ndarray | None) -> torch.Tensor | None:
            return None if array is None else torch.from_numpy(np.asarray(array))

        def objective(place: int, branch_index: int, logprobs: torch.Tensor) -> BranchLoss:
            index = indices[place]
            group = groups[index]
            branch = group.branches[branch_index]
            try:
                return branch_objective(
                    logprobs,
                    advantage=float(advantages[index][branch_index]),
                    group_size=group.group_size,
                    denominators=denominators,
                    config=config,
                    loss_mask=as_tensor(branch.loss_mask),
                    old_logprobs=as_tensor(old_logprobs.get((index, branch_index), branch.old_logprobs)),
                    ref_logprobs=as_tensor(ref_logprobs.get((index, branch_index), branch.ref_logprobs)),
                    rollout_logprobs=as_tensor(branch.rollout_logprobs),
                )
            except NonFiniteError as error:
                raise error.at(group.group_id, branch_index) from error

        return objective

    def _measure_reuse(
        self,
        groups: Sequence[PromptGroup],
        logprobs: Logprobs,
        old_logprobs: Logprobs,
        ref_logprobs: Logprobs,
    ) -> dict[str, float]:
        """How old the prompts' state is, and what a fresh capture changes on a sample (`drift_sample`).

        `state/reuse_age` is in optimizer steps, `state/reuse_logprob_change` the mean absolute change of a logprob in
        nats, and `state/reuse_loss_drift` the change of the branch's loss as a fraction of the fresh one's absolute
        value, absent where that is 0. The last two come with every `reuse_check_every`-th step of age, if any prompt
        has a state to reuse.
        """
        age, every = self.reuse.age_of(groups), self.options.reuse_check_every
        metrics = {"state/reuse_age": float(age)}
        if not age or every is None or age % every:
            return metrics
        sample = drift_sample(groups, [advantages.tolist() for advantages in self._advantages(groups)])
        if sample is None:
            return metrics
        g, b = sample
        branch, stale = groups[g].branches[b], logprobs[g, b]
        fresh = self.score([replace(groups[g], branches=(branch,))])[0, 0]
        if branch.old_logprobs is None:
            old_logprobs = {(g, b): stale} | old_logprobs
        objective = self._objective(groups, list(range(len(groups))), old_logprobs, ref_logprobs)
        drift = loss_drift(*(float(objective(g, b, torch.from_numpy(values)).loss) for values in (stale, fresh)))
        metrics["state/reuse_logprob_change"] = logprob_change(stale, fresh, branch.mask)
        return metrics if drift is None else metrics | {"state/reuse_loss_drift": drift}

    def _advantages(self, groups: Sequence[PromptGroup]) -> list[torch.Tensor]:
        return [
            group_advantages(
                [branch.reward for branch in group.branches],
                [branch.advantage for branch in group.branches],
                divide_by_std=self.options.objective.divide_by_std,
            )
            for group in groups
        ]

    def _by_advantage(self, groups: Sequence[PromptGroup], logprobs: Logprobs) -> dict[str, float]:
        """Mean logprob of the loss tokens of branches that the step pushes up, and of those it pushes down."""
        sums = {"logprobs_preferred": [0.0, 0], "logprobs_rejected": [0.0, 0]}
        for g, advantages in enumerate(self._advantages(groups)):
            for b, advantage in enumerate(advantages.tolist()):
                if advantage == 0 or (g, b) not in logprobs:
                    continue
                mask = groups[g].branches[b].mask == 1
                entry = sums["logprobs_preferred" if advantage > 0 else "logprobs_rejected"]
                entry[0] += float(logprobs[g, b][mask].sum())
                entry[1] += int(mask.sum())
        return {name: total / count for name, (total, count) in sums.items() if count}

    def _reduce_stats(self, losses: list[BranchLoss]) -> dict[str, torch.Tensor]:
        """Statistics over all branches of the global batch, on every rank."""
        stats = empty_stats(self.context.device)
        for loss in losses:
            stats = merge_stats(stats, loss.stats)
        pg = self.context.groups
        for names, op in ((SUMS, dist.ReduceOp.SUM), (MAXIMA, dist.ReduceOp.MAX), (MINIMA, dist.ReduceOp.MIN)):
            values = torch.stack([stats[name] for name in names])
            dist.all_reduce(values, op=op, group=pg.dp)
            # only the last stage has losses: take its values
            dist.broadcast(values, src=dist.get_global_rank(pg.pp, pg.pp.size() - 1), group=pg.pp)
            stats |= dict(zip(names, values.unbind(), strict=True))
        return stats

    def _share_logprobs(self, indices: list[int | None], works: list[GroupWork]) -> Logprobs:
        """Every rank's logprobs of its own groups, gathered on every rank."""
        pg = self.context.groups
        mine: Logprobs = {}
        if pg.pp.rank() == pg.pp.size() - 1:
            for index, work in zip(indices, works, strict=True):
                for branch, logprobs in work.logprobs.items():
                    mine[index, branch] = logprobs.double().cpu().numpy()
        shared: Logprobs = {}
        for group in (pg.dp, pg.pp):
            parts: list[Logprobs | None] = [None] * group.size()
            dist.all_gather_object(parts, mine, group=group)
            shared = {key: value for part in parts for key, value in part.items()}
            mine = shared
        return shared

    def _check_finite(self, groups: Sequence[PromptGroup]) -> None:
        """Raise on every rank if any gradient anywhere is NaN or Inf."""
        bad = [
            name
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and not torch.linalg.vector_norm(parameter.main_grad, torch.inf).isfinite()
        ]
        flag = torch.tensor(float(bool(bad)), device=self.context.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag:
            names = ", ".join(group.group_id for group in groups[:8])
            raise NonFiniteError(f"the gradient of {bad[0] if bad else 'a parameter of another rank'}").at(names)
