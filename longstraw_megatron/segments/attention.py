"""Softmax attention of one segment: its queries over the prefix's pages and, causally, over the segment itself.

A query attends to all rows of the prefix and to its own sequence in the segment up to itself. Every key set gives a
partial (out, lse); partials merge into softmax attention over the union. Backward over one key set needs only the
merged out and lse, so gradients of the prefix are added page by page where the rows live.

Shapes: T rows of the shard (padding last), N query heads, G key heads, H head dim, S prefix rows of this rank.
Partial outputs, lse and sums of gradients are float32 (float64 for float64).
"""

import torch
from torch import Tensor
from torch.autograd import Function

from longstraw_megatron.functional.softmax_merge import merge_partials
from longstraw_megatron.layout.blocks import Block, attention_blocks
from longstraw_megatron.ops.attention import attention_backward, attention_forward
from longstraw_megatron.segments.segment import Mode, Segment
from longstraw_megatron.state.pages import PagedRows


class _Merged:
    """Partials over rows [0, num_rows), merged as they come. No copy is made while there is only one."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        if self.out is None:
            if out.shape[0] == self.num_rows:
                self.out, self.lse = out, lse
                return
            self.out = out.new_zeros(self.num_rows, *out.shape[1:], dtype=lse.dtype)
            self.lse = lse.new_full((self.num_rows, *lse.shape[1:]), float("-inf"))
        if out.shape[0] == self.num_rows:
            self.out, self.lse = merge_partials(self.out, self.lse, out, lse)
            return
        self.out = self.out.to(lse.dtype)
        self.out[rows], self.lse[rows] = merge_partials(self.out[rows], self.lse[rows], out, lse)


class _RowSum:
    """A sum over rows [0, num_rows) of gradients that cover some of them. No copy is made while there is only one."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.total: Tensor | None = None

    def add(self, rows: slice, grad: Tensor) -> None:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        if self.total is None:
            if grad.shape[0] == self.num_rows:
                self.total = grad
                return
            self.total = grad.new_zeros(self.num_rows, *grad.shape[1:], dtype=dtype)
        self.total = self.total.to(dtype)
        self.total[rows] += grad


def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], pages: PagedRows, prefix_rows: int, softmax_scale: float
) -> tuple[Tensor | None, Tensor | None]:
    """Partial (out [n, N, H], lse [n, N]) of q [n, N, H] over the pages and the blocks of k, v; None without keys."""
    merged = _Merged(q.shape[0])
    for page in pages.pages(prefix_rows):
        merged.add(
            slice(0, q.shape[0]), *attention_forward(q, *page.tensors, causal=False, softmax_scale=softmax_scale)
        )
    for block in blocks:
        q_block, k_block, v_block = q[block.query_rows], k[block.key_rows], v[block.key_rows]
        partial = attention_forward(q_block, k_block, v_block, causal=block.causal, softmax_scale=softmax_scale)
        merged.add(block.query_rows, *partial)
    return merged.out, merged.lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: list[Block],
    pages: PagedRows,
    prefix_rows: int,
    dk: _RowSum,
    dv: _RowSum,
    *,
    add_to_pages: bool,
    softmax_scale: float,
) -> Tensor | None:
    """dq [n, N, H] of the same partial, given the merged out and lse; adds to dk, dv and the pages' accumulators."""
    dq = _RowSum(q.shape[0])
    for page in pages.pages(prefix_rows):
        grad_q, *grads = attention_backward(dout, q, *page.tensors, out, lse, causal=False, softmax_scale=softmax_scale)
        dq.add(slice(0, q.shape[0]), grad_q)
        if add_to_pages:
            pages.add_grad(page, *grads)
    for block in blocks:
        rows, keys = block.query_rows, block.key_rows
        grad_q, grad_k, grad_v = attention_backward(
            dout[rows],
            q[rows],
            k[keys],
            v[keys],
            out[rows],
            lse[rows],
            causal=block.causal,
            softmax_scale=softmax_scale,
        )
        dq.add(rows, grad_q)
        dk.add(keys, grad_k)
        dv.add(keys, grad_v)
    return dq.total


def _padded(x: Tensor | None, like: Tensor) -> Tensor:
    """`x` [n, ...] in the dtype of `like` [T, ...], zeros behind."""
    if x is not None and x.shape[0] == like.shape[0]:
        return x.to(like.dtype)
    whole = torch.zeros_like(like)
    if x is not None:
        whole[: x.shape[0]] = x
    return whole


def segment_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, segment: Segment, layer_number: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """(out [T, N, H] with zeros in padding rows, lse [valid, N])."""
    valid = segment.valid
    pages = segment.state.rows("kv", layer_number)
    blocks = attention_blocks(segment.runs, segment.runs)
    out, lse = attend_forward(q[:valid], k, v, blocks, pages, segment.prefix_rows, softmax_scale)
    if lse is None:
        lse = q.new_empty(0, q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    return _padded(out, q), lse


def segment_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segment: Segment,
    layer_number: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); in a walk dk and dv include what later segments accumulated for this segment's own rows."""
    valid = segment.valid
    pages = segment.state.rows("kv", layer_number)
    dk, dv = _RowSum(valid), _RowSum(valid)
    dq = attend_backward(
        dout[:valid],
        q[:valid],
        out[:valid],
        lse,
        k,
        v,
        attention_blocks(segment.runs, segment.runs),
        pages,
        segment.prefix_rows,
        dk,
        dv,
        add_to_pages=segment.reads_with_grad,
        softmax_scale=softmax_scale,
    )
    if segment.mode is Mode.WALK:
        grads = pages.grad(segment.prefix_rows, segment.prefix_rows + valid)
        if grads is not None:
            dk.add(slice(0, valid), grads[0])
            dv.add(slice(0, valid), grads[1])
    return _padded(dq, q), _padded(dk.total, k), _padded(dv.total, v)


class SegmentAttention(Function):
    """Saves q, k, v, out, lse; the prefix is read again from its pages in backward, never saved."""

    @staticmethod
    def forward(ctx, q, k, v, segment, layer_number, softmax_scale):
        out, lse = segment_attention_forward(q, k, v, segment, layer_number, softmax_scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segment, ctx.layer_number, ctx.softmax_scale = segment, layer_number, softmax_scale
        return out

    @staticmethod
    def backward(ctx, dout):
        saved = (*ctx.saved_tensors, ctx.segment, ctx.layer_number, ctx.softmax_scale)
        return *segment_attention_backward(dout, *saved), None, None, None


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, *, segment: Segment, layer_number: int, cp_group=None, softmax_scale: float
) -> Tensor:
    """Attention of a segment's queries [T, N, H] over its prefix and its own keys k, v [T, G, H]: out [T, N, H].

    Prefill appends the valid rows of k, v to the state. Backward of replay and walk adds to the accumulators of the
    prefix where the state is exact; a walk's dk, dv include the gradient accumulated for the segment's own rows.
    Padding rows come out as zeros and get zero gradients. Forward has no side effect outside prefill.
    """
    if segment.mode is Mode.PREFILL:
        valid = segment.valid
        segment.state.rows("kv", layer_number).append(k[:valid], v[:valid])
    return SegmentAttention.apply(q, k, v, segment, layer_number, softmax_scale)
