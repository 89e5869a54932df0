"""The interpreter of plans with a pipeline's own forward step and loss in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from longstraw_megatron.comm.pipeline import StageLink
from longstraw_megatron.errors import NonFiniteError, RefusedError
from longstraw_megatron.mcore.branch_model import BranchCall, BranchModel
from longstraw_megatron.mcore.engine import Engine, LiveGraph
from longstraw_megatron.mcore.group_work import GroupWork
from longstraw_megatron.mcore.head import hidden_only
from longstraw_megatron.mcore.monitor import Monitor
from longstraw_megatron.mcore.parallel import ParallelContext
from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.schedule import Action


@dataclass(frozen=True)
class ForwardStep:
    """The pipeline's side of a step.

    `samples[chunk][group][branch]` are what its iterators gave, `divisor` what Megatron's loss convention divides a
    2-tuple's loss (and a 3-tuple's without calculate_per_token_loss) by.
    """

    func: Callable[[Any, Any], tuple[Any, Callable | None]]
    samples: Sequence[Sequence[Sequence[Any]]]
    divisor: int
    make_iterator: Callable[[Any], Any]
    padded_length: Callable[[int], int]  # of a sample's length
    collect_non_loss_data: bool = False


@dataclass
class SampleResult:
    """What Megatron's schedules gather; on the ranks of the last stage."""

    data: dict[tuple[int, int], Any] = field(default_factory=dict)  # by (group, branch)
    num_tokens: Tensor | None = None  # int, summed over 3-tuples


class SampleEngine(Engine):
    """Runs plans whose branches go through a pipeline's forward_step_func; `chunks` are as the pipeline has them."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        context: ParallelContext,
        config: TransformerConfig,
        *,
        monitor: Monitor,
        link: StageLink | None,
    ):
        super().__init__(chunks, context, monitor=monitor, link=link)
        self.wrapped = list(chunks)
        self.config = config

    def run_samples(
        self, actions: Sequence[Action], works: Sequence[GroupWork], step: ForwardStep, *, forward_only: bool
    ) -> SampleResult:
        """Run a plan over the prompt groups of `works`, calling `step.func` for every branch on every stage."""
        self._step = step
        self._samples = SampleResult(num_tokens=torch.zeros([], dtype=torch.int, device=self.context.device))
        self._interpret(actions, works, with_graph=not forward_only)
        return self._samples

    def _replay(self, action: Action, work: GroupWork, segment: SegmentPass, stage_input: Tensor | None) -> LiveGraph:
        """A branch by the pipeline's forward step; a filler by the chunk alone, at zero weight."""
        chunk, is_last = self._chunk(action), self._is_last(action)
        ids = work.branch_ids(action.unit)
        if not work.microbatches[action.unit]:
            out = self._model_forward(chunk, segment, ids, stage_input, hidden_only)
            return LiveGraph(stage_input, out, torch.zeros_like(out) if is_last else None)
        (branch,) = work.microbatches[action.unit]
        call = BranchCall(
            segment=segment,
            ids=ids,
            padded_length=self._step.padded_length(segment.layout.num_tokens),
            stage_input=stage_input,
            name=f"Group {work.group.group_id}, branch {branch}",
        )
        self._start_timer()
        iterator = self._step.make_iterator(self._step.samples[chunk][action.group][branch])
        output, loss_func = self._step.func(iterator, BranchModel(self.wrapped[chunk], call))
        if len(call.outputs) != 1:
            raise RefusedError(
                f"{call.name}: forward_step_func called its model {len(call.outputs)} times, wanted once per sample; "
                "call the model that it is given."
            )
        output = self._loss_of(action, branch, output, loss_func)
        if not is_last or not self._with_graph:
            return LiveGraph(stage_input, output, None)
        if not output.requires_grad:
            # a loss of nothing; the stages and ranks that wait for this backward get their zeros
            (out,) = call.outputs
            return LiveGraph(stage_input, out, torch.zeros_like(out))
        if not self.config.fp16 and not torch.isfinite(output.detach()).all():
            raise NonFiniteError("the loss").at(work.group.group_id, branch)
        scale = self.config.grad_scale_func
        return LiveGraph(stage_input, output if scale is None else scale(output), None)

    def _loss_of(self, action: Action, branch: int, output: Any, loss_func: Callable | None) -> Any:
        """Megatron's own scaling of a loss by its tuple, CP size and `divisor`; the stage's output before the last."""
        data: list[Any] = []
        chunk = self._chunk(action)
        output, num_tokens = forward_step_calc_loss(
            self.chunks[chunk],
            output,
            loss_func,
            self.config,
            self.chunks[chunk].vp_stage,
            self._step.collect_non_loss_data,
            self._step.divisor,
            data,
            self.context.groups.cp.size(),
            self._is_last(action),
        )
        if self._is_last(action):
            (self._samples.data[action.group, branch],) = data
            self._samples.num_tokens += num_tokens
        return output

    def _check_finite(self, action: Action) -> None:
        # in fp16 an overflow is part of the day: the loss scaler sees it and skips the step
        if not self.config.fp16:
            super()._check_finite(action)

    def _start_timer(self) -> None:
        """Megatron's timer of a forward step; `forward_step_calc_loss` stops it."""
        if self.config.timers is not None:
            self.config.timers("forward-compute", log_level=2).start()
