"""Causal depthwise convolution that starts from a tail, by plain PyTorch or by flash-linear-attention's kernel.

B batch, T tokens, C channels, W taps.

    kernel="torch"   `functional.causal_conv.causal_conv`: any device and dtype.
    kernel="fla"     fla.modules.convolution.causal_conv1d (fla >= 0.5.2): CUDA.

`ops.delta_rule.default_kernel` says which there is.
"""

from typing import Literal

import torch
from torch import Tensor

from longstraw_megatron.functional.causal_conv import causal_conv as torch_causal_conv

Kernel = Literal["torch", "fla"]


def _fla_causal_conv(
    rows: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, valid: int
) -> tuple[Tensor, Tensor]:
    from fla.modules.convolution import causal_conv1d

    # The tail goes in as rows, whose outputs are dropped: so its gradient needs no support from the kernel's own state.
    num_tail = tail.shape[1]
    extended = torch.cat([tail, rows], dim=1)
    out, _ = causal_conv1d(extended, weight, bias)
    return out[:, num_tail:], extended[:, valid : valid + num_tail].contiguous()


def causal_conv(
    rows: Tensor,
    tail: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    valid: int | None = None,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """Convolve rows [B, T, C], of which the first see tail [B, W-1, C], with weight [C, W] (and bias [C]).

    Returns out [B, T, C] (no activation) and new_tail [B, W-1, C]: the last W-1 of [tail | rows], or of
    [tail | rows[:, :valid]] where the rest is padding. T may be anything, 0 and less than W-1 included.
    """
    if kernel == "torch" or rows.shape[1] == 0:
        return torch_causal_conv(rows, tail, weight, bias, valid=valid)
    return _fla_causal_conv(rows, tail, weight, bias, rows.shape[1] if valid is None else valid)
