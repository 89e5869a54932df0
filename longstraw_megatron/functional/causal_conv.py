"""Depthwise causal convolution along the sequence that starts from a tail.

B batch, T tokens, C channels, W taps. With x = [tail | rows] along the sequence,

    out[t] = bias + sum_w weight[:, w] x[t + w],        new_tail = x[T : T + W - 1]

so that a sequence cut anywhere, the tail handed on, gives the rows of the uncut one. It is W fused multiply-adds on
[B, T, C] as it lies: no transposition to channels first, and nothing but the inputs is kept for backward.
"""

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable


def _compute_dtype(rows: Tensor) -> torch.dtype:
    """Taps are summed in float32 where rows are bfloat16 or float16."""
    return torch.promote_types(rows.dtype, torch.float32)


def _forward(rows: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype, num_rows = _compute_dtype(rows), rows.shape[1]
    extended = torch.cat([tail, rows], dim=1).to(dtype)
    taps = weight.to(dtype).unbind(1)
    out = extended[:, :num_rows] * taps[0]
    for tap, weight_tap in enumerate(taps[1:], start=1):
        out.addcmul_(extended[:, tap : tap + num_rows], weight_tap)
    if bias is not None:
        out += bias.to(dtype)
    return out.to(rows.dtype)


def _backward(dout: Tensor, rows: Tensor, tail: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(d[tail | rows] [B, W-1+T, C], dweight [C, W], dbias [C]), all in the compute dtype; dout, rows: [B, T, C]."""
    dtype, num_rows = _compute_dtype(rows), rows.shape[1]
    dout = dout.to(dtype)
    extended = torch.cat([tail, rows], dim=1).to(dtype)
    dextended = torch.zeros_like(extended)
    dweight = torch.empty_like(weight, dtype=dtype)
    for tap, weight_tap in enumerate(weight.to(dtype).unbind(1)):
        seen = slice(tap, tap + num_rows)
        dextended[:, seen].addcmul_(dout, weight_tap)
        dweight[:, tap] = (extended[:, seen] * dout).sum((0, 1))
    return dextended, dweight, dout.sum((0, 1))


class _CausalConv(Function):
    @staticmethod
    def forward(ctx, rows, tail, weight, bias, valid):
        ctx.save_for_backward(rows, tail, weight)
        ctx.valid, ctx.has_bias = valid, bias is not None
        ctx.set_materialize_grads(False)
        num_tail = tail.shape[1]
        new_tail = torch.cat([tail, rows[:, max(0, valid - num_tail) : valid]], dim=1)
        return _forward(rows, tail, weight, bias), new_tail[:, new_tail.shape[1] - num_tail :].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dnew_tail):
        rows, tail, weight = ctx.saved_tensors
        num_tail, dweight, dbias = tail.shape[1], None, None
        if dout is not None:
            dextended, dweight, dbias = _backward(dout, rows, tail, weight)
            dweight, dbias = dweight.to(weight.dtype), dbias.to(weight.dtype) if ctx.has_bias else None
        elif dnew_tail is not None:
            shape = (rows.shape[0], num_tail + rows.shape[1], rows.shape[2])
            dextended = torch.zeros(shape, dtype=_compute_dtype(rows), device=rows.device)
        else:
            return None, None, None, None, None
        if dnew_tail is not None:
            dextended[:, ctx.valid : ctx.valid + num_tail] += dnew_tail
        dtail, drows = dextended.split([num_tail, rows.shape[1]], dim=1)
        return drows.to(rows.dtype), dtail.to(tail.dtype), dweight, dbias, None


def causal_conv(
    rows: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None = None, *, valid: int | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve rows [B, T, C], of which the first see tail [B, W-1, C], with weight [C, W] (and bias [C]).

    T may be anything, 0 and less than W-1 included. Returns out [B, T, C] in the rows' dtype (no activation) and
    new_tail [B, W-1, C], the last W-1 of [tail | rows]; with `valid`, of [tail | rows[:, :valid]] (the rest is
    padding). Both are differentiable in all inputs.
    """
    return _CausalConv.apply(rows, tail, weight, bias, rows.shape[1] if valid is None else valid)
