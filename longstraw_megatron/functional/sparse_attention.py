"""Absorbed MLA attention of each query over its own selection of rows.

A row is one token's [latent C | roped key R]; all heads share it, and its first C numbers are also its value:

    out_n = sum_j softmax_j(scale q_n . row_j) row_j[:C]     over the selected rows j

Queries go in blocks: a block gathers its rows, [block, k, C + R], and nothing of size [T, S] is made. A partial over
some of the selected rows merges with others by (out, lse); backward over it needs only the merged out and lse.

Shapes: T queries, N heads, C latent and R rotary dim, S rows, k selected rows per query. float32 where not the
inputs' dtype (float64 for float64).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from longstraw_megatron.functional.matmul import accumulation_dtype, matmul_float32

MAX_ELEMENTS = 1 << 25  # of a block's gathered rows, or of its scores: 128 MiB in float32


def _query_blocks(q: Tensor, index: Tensor, max_elements: int) -> Iterator[slice]:
    num_queries, num_heads, dim = q.shape
    step = max(1, max_elements // (index.shape[1] * max(num_heads, dim)))
    for start in range(0, num_queries, step):
        yield slice(start, min(start + step, num_queries))


def _gather_scores(q: Tensor, rows: Tensor, index: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Selected rows [t, k, C + R] and scaled scores [t, N, k], -inf where index is -1."""
    selected = rows[index.clamp_min(0)]
    scores = matmul_float32(q, selected.transpose(1, 2)).mul_(softmax_scale)
    return selected, scores.masked_fill_((index < 0).unsqueeze(1), float("-inf"))


def sparse_attention(
    q: Tensor, rows: Tensor, index: Tensor, *, softmax_scale: float, kv_lora_rank: int, max_elements: int = MAX_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, N, C + R] over rows [S, C + R] selected by index [T, k] (-1: none).

    Returns (out [T, N, C], lse [T, N]), both float32; a query without any row gets (0, -inf).
    """
    dtype = accumulation_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:2], kv_lora_rank, dtype=dtype)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=dtype)
    if index.shape[1] == 0:
        return out, lse
    for block in _query_blocks(q, index, max_elements):
        selected, scores = _gather_scores(q[block], rows, index[block], softmax_scale)
        lse[block] = scores.logsumexp(-1)
        probs = scores.sub_(_finite(lse[block]).unsqueeze(-1)).exp_()
        out[block] = matmul_float32(probs.to(q.dtype), selected[..., :kv_lora_rank])
    return out, lse


def sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    index: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    add_rows_grad: Callable[[Tensor, Tensor], None] | None,
    *,
    softmax_scale: float,
    kv_lora_rank: int,
    max_elements: int = MAX_ELEMENTS,
) -> None:
    """Backward of `sparse_attention` over one set of rows, given the merged out [T, N, C] and lse [T, N].

    Adds to dq [T, N, C + R] (float32) and calls `add_rows_grad(index [m], grad [m, C + R])` with gradients of rows,
    where a row may come any number of times; None leaves them out.
    """
    if index.shape[1] == 0:
        return
    dtype = accumulation_dtype(q.dtype)
    for block in _query_blocks(q, index, max_elements):
        selected, scores = _gather_scores(q[block], rows, index[block], softmax_scale)
        probs = scores.sub_(_finite(lse[block]).unsqueeze(-1)).exp_()
        grad_out = dout[block]
        delta = (grad_out.to(dtype) * out[block].to(dtype)).sum(-1, keepdim=True)
        grad_scores = matmul_float32(grad_out, selected[..., :kv_lora_rank].transpose(1, 2))
        grad_scores = grad_scores.sub_(delta).mul_(probs).mul_(softmax_scale).to(q.dtype)
        dq[block] += matmul_float32(grad_scores, selected)
        if add_rows_grad is not None:
            grad = matmul_float32(grad_scores.transpose(1, 2), q[block])
            grad[..., :kv_lora_rank] += matmul_float32(probs.to(q.dtype).transpose(1, 2), grad_out)
            add_rows_grad(index[block].clamp_min(0).reshape(-1), grad.flatten(0, 1))


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for -inf: the scores of a query without rows are -inf, and stay probabilities of 0."""
    return lse.masked_fill(torch.isneginf(lse), 0.0)
