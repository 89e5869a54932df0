"""The model that a pipeline's forward_step_func is given for one branch.

It is called as the pipeline calls its own model. In the call it puts in the branch's pass, as `packed_seq_params`, and
the pass's inputs; it gives the output back in the rows of the pipeline's sample. The pass is an argument of this
object: nothing is set on the model, so microbatches in flight and their recomputes do not mix.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.mcore.engine import decoder_input
from longstraw_megatron.mcore.model import unwrap
from longstraw_megatron.mcore.segment_pass import SegmentPass

# Arguments of GPTModel.forward that the pass stands for, or that would go around it
_REPLACED = ("position_ids", "attention_mask", "packed_seq_params", "padding_mask", "loss_mask")
_REFUSED = ("decoder_input", "inference_context", "inference_params")


@dataclass(eq=False)
class BranchCall:
    """One branch's way through one model chunk."""

    segment: SegmentPass
    ids: Tensor  # [1, rows] this rank's shard of the sample
    padded_length: int  # of the sample over all context-parallel ranks
    stage_input: Tensor | None
    name: str  # of the branch, for messages
    outputs: list[Tensor] = field(default_factory=list)  # of the chunk, by call; [1, rows, ...] on the last stage


class BranchModel:
    """Stands for `chunk` (a GPTModel in Megatron's wrappers or bare); all but calling it is the chunk's own.

    An attribute that the outermost wrapper lacks is looked for on the GPTModel, so that code which unwraps models by
    their class, and stops at this one, finds `pre_process`, `config` and the like.
    """

    def __init__(self, chunk: nn.Module, call: BranchCall):
        self._chunk = chunk
        self._call = call

    @property
    def module(self) -> "BranchModel":
        """What the wrapper wraps, for the same branch."""
        return BranchModel(self._chunk.module, self._call)

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._chunk, name):
            return getattr(self._chunk, name)
        return getattr(unwrap(self._chunk), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """GPTModel.forward's arguments, with input_ids (and labels) [1, S]: the sample as this rank's pipeline cut it.

        Returns the stage's hidden states; on the last stage logits [1, S, V / TP], or losses [1, S] where `labels` are
        given. Rows behind the sample are not to be read: they have no valid token.

        Raises:
            RefusedError: other tokens than the branch's, another cut than announced, or an argument that has no
                meaning for a segment.
        """
        model, call = unwrap(self._chunk), self._call
        names = list(inspect.signature(model.forward).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        for name in _REFUSED:
            if arguments.get(name) is not None:
                raise RefusedError(f"{call.name} got {name} from forward_step_func, wanted none; leave it out.")
        sample_rows = self._check_sample(arguments)
        arguments |= dict.fromkeys(_REPLACED)
        arguments["input_ids"] = call.ids
        arguments["packed_seq_params"] = call.segment
        arguments["decoder_input"] = decoder_input(model, call.ids, call.stage_input)
        if arguments.get("labels") is not None:
            arguments["labels"] = _to_rows(arguments["labels"], call.segment.rows)
        # by name: Megatron's wrapper for half precision casts what comes by place
        out = self._chunk(**arguments)
        call.outputs.append(out)
        if not model.post_process:
            return out
        if out.dim() < 2 or out.shape[:2] != (1, call.segment.rows):
            raise RefusedError(
                f"{call.name} got an output of shape {list(out.shape)} from the model, wanted [1, "
                f"{call.segment.rows}, ...]; let an output_processor return the rows that it is given."
            )
        return _to_rows(out, sample_rows)

    forward = __call__

    def _check_sample(self, arguments: dict[str, Any]) -> int:
        """Rows of the pipeline's sample on this rank."""
        call = self._call
        sample = arguments.get("input_ids")
        sample = arguments.get("labels") if sample is None else sample
        if sample is None:
            if unwrap(self._chunk).post_process:
                raise RefusedError(f"{call.name} got neither input_ids nor labels, wanted one of them on every rank.")
            return call.segment.rows
        if sample.dim() != 2 or sample.shape[0] != 1:
            raise RefusedError(
                f"{call.name} got a sample of shape {list(sample.shape)}, wanted [1, S]; give one branch per sample."
            )
        layout, cp_rank = call.segment.layout, call.segment.cp_rank
        padded_length = _padded_length(arguments.get("packed_seq_params"), sample.shape[1], layout.cp_size)
        if layout.cp_size > 1 and padded_length != call.padded_length:
            raise RefusedError(
                f"{call.name} got a sample of {padded_length} tokens with its padding, wanted {call.padded_length}; "
                "set sample_multiple to what the pipeline pads a sample to a multiple of."
            )
        valid = layout.valid(cp_rank)
        given = arguments.get("input_ids")
        if given is not None and not torch.equal(given[0, :valid].to(call.ids.device), call.ids[0, :valid]):
            raise RefusedError(
                f"{call.name} got other input_ids than its sample's {valid} on this rank, wanted [last prompt token] + "
                f"response, cut over CP in {layout.cp_size} and padded at the end; build samples with sample_tokens."
            )
        return sample.shape[1]


def _padded_length(packed_seq_params: Any, rows: int, cp_size: int) -> int:
    """Length of the sample over all CP ranks as the pipeline cut it; a packed batch may have more padding behind it."""
    for name in ("cu_seqlens_q_padded", "cu_seqlens_q"):
        cu_seqlens = getattr(packed_seq_params, name, None)
        if cu_seqlens is not None:
            return int(cu_seqlens[1] - cu_seqlens[0])
    return rows * cp_size


def _to_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """[1, rows, ...] -> [1, num_rows, ...]: padding rows cut off, or added as zeros; no copy where none are added."""
    missing = num_rows - tensor.shape[1]
    if missing <= 0:
        return tensor[:, :num_rows]
    padding = tensor.new_zeros(1, missing, *tensor.shape[2:])
    return torch.cat((tensor, padding), dim=1)
