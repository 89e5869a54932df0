"""Matrix products of half-precision inputs that keep their float32 sums."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over `dtype` are kept in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """a [.., m, k] @ b [.., k, n] of one dtype, both 2-D or both 3-D; the result is float32 (float64 for float64).

    Products of bfloat16 are exact in float32, so on CUDA the inputs need not be cast for a float32 result.
    """
    if accumulation_dtype(a.dtype) == a.dtype:
        return a @ b
    if not a.is_cuda:
        return a.float() @ b.float()
    product = torch.mm if a.dim() == 2 else torch.bmm
    return product(a, b, out_dtype=torch.float32)
