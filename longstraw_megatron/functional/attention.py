"""Softmax attention over one block of keys, and its backward as a block of a larger softmax: the readable truth.

T queries, S keys, N query heads, G key heads (N a multiple of G, query head n reads key head n // (N / G)), H head dim.
With the row maximum folded into lse, the softmax over ANY set of keys is P = exp(scale q k - lse). So the backward over
one block of keys is right as soon as `out` and `lse` are those of the whole set: nothing else couples the blocks.
"""

import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, *, causal: bool, softmax_scale: float) -> Tensor:
    """[G, N/G, T, S], -inf where masked."""
    num_queries, num_heads, _ = q.shape
    num_keys, num_key_heads, _ = k.shape
    q = q.unflatten(1, (num_key_heads, num_heads // num_key_heads))
    scores = torch.einsum("tgnh,sgh->gnts", q, k) * softmax_scale
    if causal:
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [T, N, H] over k, v [S, G, H].

    `causal` is aligned at the top left: query i sees keys 0..i. Returns out [T, N, H] in q's dtype and lse [T, N]
    float32 (float64 for float64). Without keys, out = 0 and lse = -inf.
    """
    dtype = _compute_dtype(q)
    scores = _scores(q.to(dtype), k.to(dtype), causal=causal, softmax_scale=softmax_scale)
    lse = torch.logsumexp(scores, dim=-1)  # [G, N/G, T]
    out = torch.einsum("gnts,sgh->tgnh", torch.exp(scores - lse.unsqueeze(-1)), v.to(dtype))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(0, 1).transpose(0, 1)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention for one block of keys of a larger softmax.

    dout, q, out: [T, N, H]; k, v: [S, G, H]; lse: [T, N]. `out` and `lse` are the merged ones over all blocks.
    Returns (dq [T, N, H], dk [S, G, H], dv [S, G, H]) in q's dtype; dq is this block's part, to be summed over blocks.
    """
    dtype, num_key_heads = _compute_dtype(q), k.shape[1]
    dout, out, q_, k_, v_ = (x.to(dtype) for x in (dout, out, q, k, v))
    grouped = (num_key_heads, q.shape[1] // num_key_heads)
    lse = lse.to(dtype).transpose(0, 1).unflatten(0, grouped)
    probs = torch.exp(_scores(q_, k_, causal=causal, softmax_scale=softmax_scale) - lse.unsqueeze(-1))
    dout, out, q_ = (x.unflatten(1, grouped) for x in (dout, out, q_))
    delta = torch.einsum("tgnh,tgnh->gnt", dout, out)  # = sum over all keys of P dP
    dprobs = torch.einsum("tgnh,sgh->gnts", dout, v_)
    dscores = probs * (dprobs - delta.unsqueeze(-1)) * softmax_scale
    dq = torch.einsum("gnts,sgh->tgnh", dscores, k_).flatten(1, 2)
    dk = torch.einsum("gnts,tgnh->sgh", dscores, q_)
    dv = torch.einsum("gnts,tgnh->sgh", probs, dout)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
