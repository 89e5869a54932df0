"""Softmax attention of one segment: its queries over the prefix and, causally, over the segment itself.

A query attends to all rows of the prefix and to its own sequence in the segment up to itself. Keys, and the gradients
of the prefix's keys, stay on the rank that ran their tokens; queries travel with what they gathered so far, (out, lse)
in forward and dq in backward. Where that moves fewer bytes, all queries or all keys are gathered instead
(`layout.transfer`); all forms give the same result.

Shapes: T rows of this rank's shard (padding last), N query heads, G key heads, H head dim, CP ranks. Partial outputs,
lse and sums of gradients are float32 (float64 for float64).
"""

import torch
from torch import Tensor
from torch.autograd import Function

from longstraw_megatron.layout.transfer import Transfer
from longstraw_megatron.segments.attention_transfer import (
    AttentionCall,
    gather_keys_backward,
    gather_keys_forward,
    gather_queries_backward,
    gather_queries_forward,
    ring_backward,
    ring_forward,
    transfer_of,
)
from longstraw_megatron.segments.key_shard import attend_backward, attend_forward, sum_dtype
from longstraw_megatron.segments.segment import Mode, Segment


def _padded(x: Tensor | None, like: Tensor) -> Tensor:
    """`x` [n, ...] in the dtype of `like` [T, ...], zeros behind."""
    if x is not None and x.shape[0] == like.shape[0]:
        return x.to(like.dtype)
    whole = torch.zeros_like(like)
    if x is not None:
        whole[: x.shape[0]] = x
    return whole


def segment_attention_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out [T, N, H] with zeros in padding rows, lse [T, N]; [valid, N] on one rank)."""
    segment = call.segment
    if segment.layout.num_tokens == 0:
        return torch.zeros_like(q), q.new_empty(0, q.shape[1], dtype=sum_dtype(q.dtype))
    keys = call.local_keys(k, v, backward=False)
    if segment.layout.cp_size == 1:
        out, lse = attend_forward(q[: segment.valid], segment.runs, keys, call.softmax_scale)
    else:
        forms = {"ring": ring_forward, "gather_queries": gather_queries_forward, "gather_keys": gather_keys_forward}
        out, lse = forms[transfer_of(q, k, call, backward=False)](q, keys, call)
    return _padded(out, q), lse


def segment_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); in a walk dk and dv include what later segments accumulated for this segment's own rows."""
    segment = call.segment
    if segment.layout.num_tokens == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keys, valid = call.local_keys(k, v, backward=True), segment.valid
    if segment.layout.cp_size == 1:
        shard = (x[:valid] for x in (dout, q, out, lse))
        dq = attend_backward(*shard, segment.runs, keys, call.softmax_scale)
    else:
        forms = {"ring": ring_backward, "gather_queries": gather_queries_backward, "gather_keys": gather_keys_backward}
        dq = forms[transfer_of(q, k, call, backward=True)](dout, q, out, lse, keys, call)
    if segment.mode is Mode.WALK:
        grads = call.pages.grad(segment.prefix_rows, segment.prefix_rows + valid)
        if grads is not None:
            keys.dk.add(slice(0, valid), grads[0])
            keys.dv.add(slice(0, valid), grads[1])
    return _padded(dq, q), _padded(keys.dk.total, k), _padded(keys.dv.total, v)


class SegmentAttention(Function):
    """Saves q, k, v, out, lse; the prefix is read again from its pages in backward, never saved."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        out, lse = segment_attention_forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, dout):
        return *segment_attention_backward(dout, *ctx.saved_tensors, ctx.call), None


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment: Segment,
    layer_number: int,
    cp_group=None,
    softmax_scale: float,
    transfer: Transfer | None = None,
) -> Tensor:
    """Attention of a segment's queries [T, N, H] over its prefix and its own keys k, v [T, G, H]: out [T, N, H].

    Prefill appends the valid rows of k, v to the state. Backward of replay and walk adds to the accumulators of the
    prefix where the state is exact; a walk's dk, dv include the gradient accumulated for the segment's own rows.
    Padding rows come out as zeros and get zero gradients. Forward has no side effect outside prefill. `cp_group` is
    the group that the segment's layout was cut for; `transfer` overrides the choice by byte counts.
    """
    cp_size = 1 if cp_group is None else cp_group.size()
    if cp_size != segment.layout.cp_size:
        raise ValueError(
            f"The segment was cut for {segment.layout.cp_size} context-parallel ranks, and the group has {cp_size}."
        )
    if segment.mode is Mode.PREFILL:
        valid = segment.valid
        segment.state.rows("kv", layer_number).append(k[:valid], v[:valid])
    call = AttentionCall(segment, layer_number, cp_group, softmax_scale, transfer)
    return SegmentAttention.apply(q, k, v, call)
