"""The oracle for GLM: Hugging Face's model with a stable top-k, ties by lowest position.

With few index heads ReLU makes many scores exactly 0, and `topk` breaks such ties by the number of keys: a full
sequence and a cached continuation of it then select different tokens, in Hugging Face itself too.
"""

import contextlib
from collections.abc import Iterator

import torch
from oracle import DenseResult, dense_grpo


def _stable_topk(scores: torch.Tensor, k: int, dim: int = -1, **_) -> torch.return_types.topk:
    values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


@contextlib.contextmanager
def stable_topk() -> Iterator[None]:
    """`Tensor.topk`, which the indexer calls, is stable inside the block."""
    plain = torch.Tensor.topk
    torch.Tensor.topk = _stable_topk
    try:
        yield
    finally:
        torch.Tensor.topk = plain


def glm_truth(model, groups: list[dict], *, detached: bool = False) -> DenseResult:
    """Loss, logprobs and gradient of `groups`; the indexer has no gradient."""
    with stable_topk():
        return dense_grpo(model, groups, detached=detached)
