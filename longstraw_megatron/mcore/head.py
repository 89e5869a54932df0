"""The last stage's output: nothing for prompt segments, blocked logprobs for branches.

Both are `output_processor`s of GPTModel.forward, Megatron's hook behind the final norm.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from longstraw_megatron.layout import SegmentLayout
from longstraw_megatron.mcore.weight_grads import main_grad_of
from longstraw_megatron.segments.logprobs import blocked_logprobs


def hidden_only(hidden_states: Tensor, **_kwargs) -> Tensor:
    """Prompt positions get no logits: [T, 1, D] is returned as it is."""
    return hidden_states


@dataclass(frozen=True, eq=False)
class LogprobHead:
    """Logprobs of `targets` [T] for the rows of a branch segment, [T] float32; padding (target -1) gives 0."""

    targets: Tensor
    tp_group: dist.ProcessGroup
    block_size: int | None = None

    def __call__(self, hidden_states: Tensor, output_layer, output_weight: Tensor | None, config, **_kwargs) -> Tensor:
        if config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=self.tp_group
            )
        elif self.tp_group.size() > 1:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=self.tp_group)
        weight = output_layer.weight if output_weight is None else output_weight
        hidden = hidden_states[:, 0]
        how = {"block_size": self.block_size, "tp_group": self.tp_group, "grad_weight_sink": main_grad_of(weight)}
        rows = torch.nonzero(self.targets >= 0)[:, 0]
        if 2 * len(rows) > len(self.targets):
            return blocked_logprobs(hidden, weight, self.targets, **how)
        # mostly padding, or prompt (mcore/dense.py): no logits for it
        some = blocked_logprobs(hidden[rows], weight, self.targets[rows], **how)
        return some.new_zeros(self.targets.shape).index_copy(0, rows, some)


def gather_logprobs(local: Tensor, layout: SegmentLayout, cp_rank: int, cp_group: dist.ProcessGroup) -> list[Tensor]:
    """Logprobs of a rank's rows [T] -> those of each whole sequence, [length] each, on every context-parallel rank."""
    packed = local.new_zeros(layout.num_tokens)
    index = torch.tensor(layout.packed_index(cp_rank), dtype=torch.long, device=local.device)
    packed[index] = local[: len(index)]
    if layout.cp_size > 1:
        dist.all_reduce(packed, group=cp_group)
    return list(packed.split(layout.lengths))


def scatter_rows(packed: Tensor, layout: SegmentLayout, cp_rank: int) -> Tensor:
    """Values of all tokens in packed order -> this rank's rows [T]; padding gets 0."""
    index = torch.tensor(layout.packed_index(cp_rank), dtype=torch.long, device=packed.device)
    rows = packed.new_zeros(layout.rows)
    rows[: len(index)] = packed[index]
    return rows
