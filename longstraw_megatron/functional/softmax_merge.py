"""Merging attention over two disjoint sets of keys.

    lse = logaddexp(lse_a, lse_b)
    out = out_a + exp(lse_b - lse) (out_b - out_a)

Because exp(lse_a - lse) + exp(lse_b - lse) = 1, one weight is enough. An empty set of keys is lse = -inf, out = 0.
"""

import torch
from torch import Tensor


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    out_a, out_b: [T, N, H], any dtype; lse_a, lse_b: [T, N], float32 (float64 for float64).
    Returns out [T, N, H] and lse [T, N] in the dtype of the lse. Either set, or both, may be empty for any row.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # Where both sets are empty, lse_b - lse is inf - inf: subtract 0 instead, so that the weight is exp(-inf) = 0.
    weight_b = torch.exp(lse_b - lse.masked_fill(lse == float("-inf"), 0.0))
    return torch.lerp(out_a.to(lse.dtype), out_b.to(lse.dtype), weight_b.unsqueeze(-1)), lse
