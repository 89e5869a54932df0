"""The interpreter: runs one rank's list of actions on its model chunks.

What an action does is told here and nowhere else; which actions come in which order is the plan's (schedule/). A
stage keeps its input of every prompt segment from PREFILL to PROMPT_BACKWARD, on the device or in host memory, and one
live graph per microbatch between FORWARD and BACKWARD.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from longstraw_megatron.comm.pipeline import StageLink
from longstraw_megatron.errors import NonFiniteError
from longstraw_megatron.functional.objective import BranchLoss
from longstraw_megatron.mcore.group_work import GroupWork
from longstraw_megatron.mcore.head import LogprobHead, gather_logprobs, hidden_only, scatter_rows
from longstraw_megatron.mcore.model import unwrap
from longstraw_megatron.mcore.monitor import Monitor
from longstraw_megatron.mcore.parallel import ParallelContext
from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.ops.host import to_device, to_host
from longstraw_megatron.schedule.actions import Action, Op
from longstraw_megatron.segments.segment import Mode

# (group index, branch index, logprobs [R]) -> loss of the branch and its gradient by logprob
Objective = Callable[[int, int, Tensor], BranchLoss]
Key = tuple[Op, int, int, int]  # (op, group, unit, stage) of the compute action that a tensor belongs to


@dataclass
class LiveGraph:
    """A microbatch between FORWARD and BACKWARD on one stage."""

    stage_input: Tensor | None  # leaf whose gradient goes to the stage before
    output: Tensor  # hidden states; on the last stage logprobs of this rank's rows, or a loss
    grad_output: Tensor | None  # last stage: d loss / d output; None for a loss, and for what the next stage sends


@dataclass
class StepResult:
    """Losses by (group, branch), on the ranks of the last stage; logprobs lie on the GroupWorks."""

    losses: dict[tuple[int, int], BranchLoss] = field(default_factory=dict)


def decoder_input(model: GPTModel, ids: Tensor, stage_input: Tensor | None) -> Tensor | None:
    """What enters the decoder: embedded `ids` [1, rows] on the first stage; elsewhere the stage's input is set."""
    if not model.pre_process:
        model.set_input_tensor(stage_input)
        return None
    embedded = model.embedding(input_ids=ids, position_ids=None)
    if torch.is_grad_enabled() and not embedded.requires_grad:
        # with a frozen embedding, a checkpointed decoder would silently lose every gradient
        embedded.requires_grad_()
    return embedded


class Engine:
    """Runs plans over `chunks` (GPTModels, in DDP or not), one per virtual stage of this pipeline rank."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        context: ParallelContext,
        *,
        monitor: Monitor,
        link: StageLink | None = None,
        logprob_block: int | None = None,
        stage_inputs: str = "device",
        progress: Callable[[Action], None] | None = None,
    ):
        self.chunks: list[GPTModel] = [unwrap(chunk) for chunk in chunks]
        self.context = context
        self.monitor = monitor
        self.link = link
        self.logprob_block = logprob_block
        self.stage_inputs = stage_inputs
        self.progress = progress
        self.pp_size = context.groups.pp.size()
        self.num_stages = self.pp_size * len(self.chunks)
        self._probes = [_probe(chunk) for chunk in self.chunks]
        self._handlers = {
            Op.PREFILL: self._prefill,
            Op.BLOCK_PREFILL: self._block_prefill,
            Op.BLOCK_BACKWARD: self._block_backward,
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.PROMPT_BACKWARD: self._prompt_backward,
        }

    def run(
        self,
        actions: Sequence[Action],
        works: Sequence[GroupWork],
        *,
        objective: Objective | None = None,
        keep_states: bool = False,
    ) -> StepResult:
        """Run a plan over the prompt groups of `works`; without an objective, branches are only scored (no graph).

        A prompt's state goes with the last action of its group, but for those of detached prompts with `keep_states`.
        """
        self._objective, self._result = objective, StepResult()
        self._interpret(actions, works, with_graph=objective is not None, keep_states=keep_states)
        return self._result

    def _interpret(
        self, actions: Sequence[Action], works: Sequence[GroupWork], *, with_graph: bool, keep_states: bool = False
    ) -> None:
        """Run a plan; `with_graph` where its branches have a backward."""
        self._works, self._with_graph = works, with_graph
        self.kept_inputs: dict[tuple[int, int, int], Tensor] = {}  # (group, segment, stage) -> stage input
        self.kept_blocks: dict[tuple[int, int, int], Tensor] = {}  # (group, block, stage) -> stage input
        self._scored: dict[tuple[int, int], list[Tensor]] = {}  # (group, microbatch) -> logprobs of its earlier blocks
        self._block_grads: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # ... -> d loss / d logprob of each of them
        self._live: dict[tuple[int, int, int], LiveGraph] = {}
        self._arrived: dict[Key, Tensor] = {}
        self._leaving: dict[Key, Tensor] = {}
        last = {(action.group, action.stage): place for place, action in enumerate(actions) if action.op.is_compute}
        for place, action in enumerate(actions):
            if action.op.is_compute:
                self._expect_next(actions, place + 1)
                self._handlers[action.op](action)
                if last[action.group, action.stage] == place and not keep_states:
                    works[action.group].release(0, self._chunk(action))
                if self.progress is not None:
                    self.progress(action)
            else:
                self._transfer(action)
        if self.link is not None:
            self.link.wait()
        self._works = ()  # what a prompt left is stale now

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the prefix states that a run holds at this moment, by item; for who watches its progress."""
        total: Counter[str] = Counter()
        for work in self._works:
            for state in (*work.states, *work.paths.values()):
                total.update(state.nbytes())
        return dict(total)

    def _prefill(self, action: Action) -> None:
        work, chunk = self._works[action.group], self._chunk(action)
        segment = work.prompt_pass(action.unit, Mode.PREFILL, chunk)
        stage_input = self._arrived.pop(_key(action), None)
        with self._phase("prefill", action, segment), torch.no_grad():
            out = self._model_forward(chunk, segment, work.prompt_ids(action.unit), stage_input, hidden_only)
        if stage_input is not None and segment.state.exact and self._with_graph:
            self.kept_inputs[action.group, action.unit, action.stage] = self._rest(stage_input)
        self._send_later(action, out)

    def _forward(self, action: Action) -> None:
        work, chunk = self._works[action.group], self._chunk(action)
        segment = work.branch_pass(action.unit, chunk)
        stage_input = self._arrived.pop(_key(action), None)
        with self._phase("replay", action, segment), torch.set_grad_enabled(self._with_graph):
            if stage_input is not None and self._with_graph:
                stage_input.requires_grad_()
            live = self._replay(action, work, segment, stage_input)
        if self._with_graph:
            self._live[action.group, action.unit, action.stage] = live
        else:
            work.drop_path(action.unit, chunk)
        self._send_later(action, live.output)

    def _replay(self, action: Action, work: GroupWork, segment: SegmentPass, stage_input: Tensor | None) -> LiveGraph:
        """A microbatch of branches through one chunk, and on the last stage to the objective."""
        head = LogprobHead(work.branch_targets(action.unit), self.context.groups.tp, self.logprob_block)
        out = self._model_forward(self._chunk(action), segment, work.branch_ids(action.unit), stage_input, head)
        grad_output = None
        if self._is_last(action):
            grad_output = self._judge(action, work, segment, out.detach())
        return LiveGraph(stage_input, out, grad_output)

    def _judge(self, action: Action, work: GroupWork, segment: SegmentPass, logprobs: Tensor) -> Tensor | None:
        """Whole branches' logprobs to the objective; returns its gradient for this rank's rows [T]."""
        layout, branches = segment.layout, work.microbatches[action.unit]
        earlier = self._scored.pop((action.group, action.unit), [])
        if not branches:
            return torch.zeros_like(logprobs)
        whole = gather_logprobs(logprobs, layout, segment.cp_rank, self.context.groups.cp)
        if earlier:
            whole = [torch.cat([*earlier, *whole])]
        grads = []
        for branch, values in zip(branches, whole, strict=True):
            work.logprobs[branch] = values
            if not torch.isfinite(values).all():
                raise NonFiniteError("logprobs").at(work.group.group_id, branch)
            if self._objective is not None:
                loss = self._objective(action.group, branch, values)
                self._result.losses[action.group, branch] = loss
                grads.append(loss.grad_logprobs.to(logprobs))
        if not grads:
            return None
        *of_blocks, last = torch.cat(grads).split([*map(len, earlier), layout.num_tokens])
        self._block_grads[action.group, action.unit] = tuple(of_blocks)
        return scatter_rows(last, layout, segment.cp_rank)

    def _block_prefill(self, action: Action) -> None:
        """Score a block of a long response, and append what later blocks need to the branch's own path."""
        work, chunk = self._works[action.group], self._chunk(action)
        segment = work.block_pass(action.unit, Mode.PREFILL, chunk)
        stage_input = self._arrived.pop(_key(action), None)
        with self._phase("replay", action, segment), torch.no_grad():
            out = self._block_forward(action, segment, stage_input)
        if self._is_last(action):
            whole = gather_logprobs(out, segment.layout, segment.cp_rank, self.context.groups.cp)
            microbatch, _ = work.shape.block_of(action.unit)
            self._scored.setdefault((action.group, microbatch), []).extend(whole)
        if stage_input is not None and self._with_graph:
            self.kept_blocks[action.group, action.unit, action.stage] = self._rest(stage_input)
        self._send_later(action, out)

    def _block_forward(self, action: Action, segment: SegmentPass, stage_input: Tensor | None) -> Tensor:
        """A block through one chunk: hidden states, on the last stage logprobs [T]."""
        work = self._works[action.group]
        microbatch, block = work.shape.block_of(action.unit)
        head = LogprobHead(work.branch_targets(microbatch, block), self.context.groups.tp, self.logprob_block)
        ids = work.branch_ids(microbatch, block)
        return self._model_forward(self._chunk(action), segment, ids, stage_input, head)

    def _block_backward(self, action: Action) -> None:
        """Walk a block back: its logprobs' gradient from the objective, its state's from the blocks behind it."""
        work, chunk = self._works[action.group], self._chunk(action)
        microbatch, block = work.shape.block_of(action.unit)
        segment = work.block_pass(action.unit, Mode.WALK, chunk)
        stage_input = self.kept_blocks.pop((action.group, action.unit, action.stage), None)
        with self._phase("branch_backward", action, segment):
            if stage_input is not None:
                stage_input = to_device(stage_input, self.context.device).detach().requires_grad_()
            out = self._block_forward(action, segment, stage_input)
            if self._is_last(action):
                grads = self._block_grads.get((action.group, microbatch))
                grad = scatter_rows(grads[block], segment.layout, segment.cp_rank) if grads else torch.zeros_like(out)
            else:
                grad = self._arrived.pop(_key(action))
            out.backward(grad)
        work.release_block(action.unit, chunk)
        if block == 0:
            self._block_grads.pop((action.group, microbatch), None)
        self._check_finite(action)
        if stage_input is not None:
            self._send_later(action, stage_input.grad)

    def _backward(self, action: Action) -> None:
        live = self._live.pop((action.group, action.unit, action.stage))
        segment_tokens = sum(self._works[action.group].branch_layouts[action.unit].lengths)
        grad = self._arrived.pop(_key(action), None) if live.grad_output is None else live.grad_output
        with self.monitor.phase("branch_backward", tokens=segment_tokens, label=str(action)):
            torch.autograd.backward(live.output, grad)
        self._check_finite(action)
        if live.stage_input is not None:
            self._send_later(action, live.stage_input.grad)

    def _prompt_backward(self, action: Action) -> None:
        work, chunk = self._works[action.group], self._chunk(action)
        segment = work.prompt_pass(action.unit, Mode.WALK, chunk)
        stage_input = self.kept_inputs.pop((action.group, action.unit, action.stage), None)
        with self._phase("prompt_backward", action, segment):
            if stage_input is not None:
                stage_input = to_device(stage_input, self.context.device).detach().requires_grad_()
            hidden = self._model_forward(chunk, segment, work.prompt_ids(action.unit), stage_input, hidden_only)
            # The state's gradient enters inside the layers; the last hidden states themselves lead nowhere.
            grad = self._arrived.pop(_key(action), None)
            hidden.backward(torch.zeros_like(hidden) if grad is None else grad)
        work.release(action.unit, chunk)
        self._check_finite(action)
        if stage_input is not None:
            self._send_later(action, stage_input.grad)

    def _rest(self, stage_input: Tensor) -> Tensor:
        """A stage's input until its segment is walked."""
        return to_host(stage_input) if self.stage_inputs == "host" else stage_input

    def _check_finite(self, action: Action) -> None:
        """Look at one small gradient near the chunk's input, where a NaN of any later layer arrives, and name it."""
        probe = self._probes[self._chunk(action)]
        if probe is not None and not torch.isfinite(probe.main_grad).all():
            work = self._works[action.group]
            branches: tuple[int, ...] = ()
            if action.op is not Op.PROMPT_BACKWARD:
                of_block = action.op is Op.BLOCK_BACKWARD
                branches = work.microbatches[work.shape.block_of(action.unit)[0] if of_block else action.unit]
            raise NonFiniteError("a gradient").at(work.group.group_id if work.group else "(filler)", *branches)

    def _model_forward(
        self, chunk: int, segment: SegmentPass, ids: Tensor, stage_input: Tensor | None, head: Callable
    ) -> Tensor:
        model = self.chunks[chunk]
        return model(
            input_ids=ids,
            position_ids=None,
            attention_mask=None,
            decoder_input=decoder_input(model, ids, stage_input),
            packed_seq_params=segment,
            output_processor=head,
        )

    def _expect_next(self, actions: Sequence[Action], place: int) -> None:
        """Post the receives between this compute action and the next one, so that they come in while it runs."""
        for action in islice(actions, place, None):
            if action.op.is_compute:
                return
            if action.op.is_receive:
                forward = action.op is Op.RECV_FORWARD
                self.link.expect(self._shape_of(action), self.chunks[0].config.pipeline_dtype, forward=forward)

    def _transfer(self, action: Action) -> None:
        """Receive into, or send out of, what the compute action `action.of` needs or made."""
        key = (action.of, action.group, action.unit, action.stage)
        forward = action.op in (Op.RECV_FORWARD, Op.SEND_FORWARD)
        if action.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
            self.link.send(self._leaving.pop(key), forward=forward)
        else:
            self._arrived[key] = self.link.receive(
                self._shape_of(action), self.chunks[0].config.pipeline_dtype, forward=forward
            )

    def _shape_of(self, action: Action) -> tuple[int, int, int]:
        """Hidden states between stages: [rows (/ TP under sequence parallelism), 1, D]."""
        work = self._works[action.group]
        layouts = work.segment_layouts if action.of in (Op.PREFILL, Op.PROMPT_BACKWARD) else work.branch_layouts
        if action.of in (Op.BLOCK_PREFILL, Op.BLOCK_BACKWARD):
            layouts = [layout for blocks in work.block_layouts for layout in blocks]
        config = self.chunks[0].config
        return layouts[action.unit].rows // self.context.row_multiple, 1, config.hidden_size

    def _send_later(self, action: Action, tensor: Tensor) -> None:
        forward = action.op.flow == 1
        if (forward and not self._is_last(action)) or (not forward and action.stage > 0):
            self._leaving[_key(action)] = tensor.detach()

    def _is_last(self, action: Action) -> bool:
        return action.stage == self.num_stages - 1

    def _chunk(self, action: Action) -> int:
        return action.stage // self.pp_size

    def _phase(self, name: str, action: Action, segment: SegmentPass):
        return self.monitor.phase(name, tokens=segment.layout.num_tokens, label=str(action))


def _probe(chunk: GPTModel) -> nn.Parameter | None:
    """The smallest trainable parameter of the chunk's first layer that DDP gave a main_grad."""
    parameters = chunk.decoder.layers[0].parameters() if len(chunk.decoder.layers) else ()
    candidates = [p for p in parameters if p.requires_grad and hasattr(p, "main_grad")]
    return min(candidates, key=nn.Parameter.numel, default=None)


def _key(action: Action) -> Key:
    return action.op, action.group, action.unit, action.stage
