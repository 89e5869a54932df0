"""Sums that rest in fewer bits than they are made in."""

from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic"]


def stochastic_bfloat16(
    x: Tensor, generator: torch.Generator, *, rows: Tensor | None = None, num_rows: int | None = None
) -> Tensor:
    """float32 -> bfloat16, up or down at random so that the expected value is `x` (NaN and Inf as they are).

    A sum that is rounded to the nearest loses every increment below half of its last bit; here such increments arrive
    in the mean. Where x [m, ...] are `rows` [m] of `num_rows`, numbers are drawn for all of these: a row's do not
    depend on which others came.
    """
    shape = x.shape if rows is None else (num_rows, *x.shape[1:])
    low = torch.randint(0, 1 << 16, shape, dtype=torch.int32, device=x.device, generator=generator)
    if rows is not None:
        low = low[rows.to(x.device)]
    bits = (x.contiguous().view(torch.int32) + low) & -(1 << 16)
    return torch.where(torch.isfinite(x), bits.view(torch.float32), x).to(torch.bfloat16)
