"""The gated delta rule, by plain PyTorch or by flash-linear-attention's kernels.

B batch, T tokens, H heads, K key head dim, V value head dim.

    kernel="torch"   `functional.delta_rule.chunk_gated_delta_rule`: any device, float32 inside, float64 kept.
    kernel="fla"     fla.ops.gated_delta_rule.chunk_gated_delta_rule (fla >= 0.5.2): CUDA, made for bfloat16 inputs.
"""

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from longstraw_megatron.functional import delta_rule as reference
from longstraw_megatron.functional.delta_rule import Tiling, chunk_gated_delta_rule

Kernel = Literal["torch", "fla"]


def default_kernel(device: torch.device) -> Kernel:
    """ "fla" where it is installed and the device is a GPU."""
    return "fla" if device.type == "cuda" and find_spec("fla") is not None else "torch"


def default_tiling(device: torch.device, head_dims: int) -> Tiling:
    """`head_dims` is K + V. Measured on a CPU, where blocks should stay in cache: chunks of 32 are faster by a third up
    to head dims of 64, and slower above."""
    return Tiling(32 if head_dims <= 128 else 64, 1 << 17) if device.type == "cpu" else Tiling()


def _fla_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_chunk_gated_delta_rule

    return fla_chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=k.shape[-1] ** -0.5,
        initial_state=initial_state,
        output_final_state=True,
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over T tokens, from `initial_state` [B, H, K, V] (None: zero).

    q, k: [B, T, H, K], already normalised; v: [B, T, H, V]; g (log decay) and beta: [B, T, H]. Queries are scaled by
    K**-0.5. Returns out [B, T, H, V] in q's dtype and final_state [B, H, K, V] in float32 (float64 for float64), both
    differentiable in all inputs.
    """
    if kernel == "torch" or k.shape[1] == 0:  # a Triton grid cannot be empty
        tiling = default_tiling(k.device, k.shape[-1] + v.shape[-1])
        return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, tiling=tiling)
    if k.dtype == torch.float64:
        raise ValueError("kernel='fla' got float64, wanted bfloat16, float16 or float32: use kernel='torch'")
    return _fla_gated_delta_rule(q, k, v, g, beta, initial_state)


def delta_rule_affine(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """`functional.delta_rule.delta_rule_affine`: A [B, H, K, K] and B [B, H, K, V] of T tokens."""
    tiling = default_tiling(k.device, 2 * k.shape[-1] + v.shape[-1])
    return reference.delta_rule_affine(k, v, g, beta, tiling=tiling)
