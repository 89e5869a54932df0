"""Weight gradients of the vocabulary's size, added to `main_grad` where they arise.

Autograd makes a dense [vocabulary / TP, D] gradient of an embedding in every backward, and another of the output layer.
A walk has a backward for each segment, and touches few rows: they go straight into Megatron's buffer, as its fused
gradient accumulation does with linear layers. Without a `main_grad` everything is Megatron's own.
"""

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.autograd import Function


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Where the weight's gradient may be added in place, in backward; None where autograd has to carry it."""
    plain = weight.requires_grad and not hasattr(weight, "__fsdp_param__")
    return getattr(weight, "main_grad", None) if plain else None


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total [V, D] += rows [n, D] at index [n], where repetitions add up in float32 at least."""
    dtype = torch.promote_types(total.dtype, torch.float32)
    if total.dtype == dtype:
        total.index_add_(0, index, rows.to(dtype))
        return
    # one sum for each different index; a frequent token's would be swamped in low precision, addition by addition
    order = index.argsort()
    sorted_index = index[order]
    slots = torch.cat((sorted_index.new_zeros(1), (sorted_index.diff() != 0).long())).cumsum(0)
    sums = rows.new_zeros(rows.shape, dtype=dtype).index_add_(0, slots, rows[order].to(dtype))
    # slots behind the last one hold zeros, for row 0
    total.index_add_(0, torch.zeros_like(index).scatter_(0, slots, sorted_index), sums.to(total.dtype))


class _Lookup(Function):
    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return weight[ids]

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        if ids.numel():
            add_rows(ctx.weight.main_grad, ids.flatten(), grad.flatten(0, -2))
        return None, None


class SegmentEmbedding(VocabParallelEmbedding):
    """Megatron's embedding; in backward it adds the rows of its tokens to `main_grad`, and autograd gets nothing."""

    def forward(self, input_: Tensor) -> Tensor:
        """ids [1, T] -> [1, T, D], or [T / TP, 1, D] where it reduces and scatters."""
        if main_grad_of(self.weight) is None or self.gtp_remat_size > 1:
            return super().forward(input_)
        local = input_ - self.vocab_start_index
        owned = (local >= 0) & (local < self.num_embeddings_per_partition)
        out = _Lookup.apply(self.weight, local.masked_fill(~owned, 0)).masked_fill(~owned[..., None], 0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(out.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(out, group=self.tp_group) if self.tp_group.size() > 1 else out


def swap_embedding(model: nn.Module) -> None:
    """Give the word embedding of a GPTModel, if it has one, the class that adds to `main_grad`."""
    for module in model.modules():
        if type(module) is VocabParallelEmbedding:
            module.__class__ = SegmentEmbedding
