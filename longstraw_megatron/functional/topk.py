"""Stable top-k over keys that come in blocks, in any order: best score first, ties by lowest position.

A candidate is one int64: the score, mapped to an integer of the same order, above the reversed position.

    candidate = ordered(score) << 32 | (2^31 - 1 - position)

Candidates of one query are distinct and totally ordered, so the k largest of a union do not depend on how the union
was cut into blocks, on the order of the blocks, or on how `torch.topk` treats equal values. (ReLU makes many index
scores exactly 0, and plain `torch.topk` breaks such ties differently for different numbers of keys.) The running
state is the candidates themselves: 8 bytes each, which is what a score and a position take.

Shapes: T queries, B keys of a block, k selected keys, N index heads, D index head dim.
"""

import torch
from torch import Tensor

from longstraw_megatron.functional.matmul import matmul_float32

MAX_POSITION = 2**31 - 1
NONE = -(2**63)  # below every candidate
_LOW = 2**32 - 1


def _ordered(scores: Tensor) -> Tensor:
    """float32 -> int32 of the same order; its own inverse on the bits."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0: the two zeros are one tie
    return bits ^ ((bits >> 31) & MAX_POSITION)


def index_scores(index_q: Tensor, index_weights: Tensor, index_key: Tensor) -> Tensor:
    """Indexer scores sum_n w_n relu(q_n . k) of index_q [T, N, D], index_weights [T, N] and index_key [B, D].

    Returns float32 [T, B]. The weights carry all scaling, as Megatron's `DSAIndexer.forward_before_topk` returns them
    (weights * N^-0.5 * D^-0.5). Makes [T, N, B]: callers give blocks.
    """
    num_queries, num_heads, dim = index_q.shape
    index_q, index_key = (x.float() if x.dtype == torch.float64 else x for x in (index_q, index_key))
    dots = matmul_float32(index_q.reshape(-1, dim), index_key.T).view(num_queries, num_heads, -1).relu_()
    return torch.bmm(index_weights.float().unsqueeze(1), dots).squeeze(1)


def make_candidates(scores: Tensor, positions: Tensor, visible: Tensor | None = None) -> Tensor:
    """Candidates, int64 [T, B], of scores float32 [T, B] at positions [B] or [T, B] in [0, 2^31).

    Keys where `visible` (bool [T, B]) is False are none. Positions of one query must differ.
    """
    candidates = _ordered(scores).to(torch.int64)
    candidates <<= 32
    candidates |= MAX_POSITION - positions.to(torch.int64)
    if visible is not None:
        candidates.masked_fill_(~visible, NONE)
    return candidates


def empty_topk(num_queries: int, k: int, device: torch.device | str = "cpu") -> Tensor:
    """The running state before any key: int64 [T, k]."""
    return torch.full((num_queries, k), NONE, dtype=torch.int64, device=device)


def merge_topk(best: Tensor, candidates: Tensor) -> Tensor:
    """The k largest of best [T, k] and candidates [T, B], best first: int64 [T, k]."""
    return torch.cat([best, candidates], dim=1).topk(best.shape[1], dim=1).values


def topk_positions(best: Tensor) -> Tensor:
    """Positions, int32 like best, best first; -1 where there is none."""
    return (MAX_POSITION - (best & _LOW)).masked_fill_(best == NONE, -1).to(torch.int32)


def topk_scores(best: Tensor) -> Tensor:
    """Scores, float32 like best; -inf where there is none."""
    bits = (best >> 32).to(torch.int32)
    scores = (bits ^ ((bits >> 31) & MAX_POSITION)).view(torch.float32)
    return scores.masked_fill(best == NONE, float("-inf"))
