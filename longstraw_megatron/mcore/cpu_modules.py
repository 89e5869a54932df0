"""Local modules with the shape of Transformer Engine's: same arguments, parameter names and checkpoint keys.

With them Megatron's Transformer-Engine spec functions build models on a CPU, so that CPU and GPU share one spec and
one set of state-dict keys. `CpuSpecProvider` hands them out; `mcore.cpu` puts it where Megatron looks for
`TESpecProvider`.

Hidden states are [s, b, h] as everywhere in Megatron.
"""

import copy

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from longstraw_megatron.errors import RefusedError


def _normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool) -> Tensor:
    """RMSNorm without a bias, LayerNorm with one."""
    gamma = weight + 1 if zero_centered else weight
    if bias is None:
        return F.rms_norm(x, (x.shape[-1],), gamma, eps)
    return F.layer_norm(x, (x.shape[-1],), gamma, bias, eps)


class Norm(torch.nn.Module):
    """`TENorm`: RMSNorm or LayerNorm by `config.normalization`, zero-centred gamma, sequence-parallel gradient tag."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        make = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(make(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        if config.normalization == "RMSNorm":
            self.bias = None
        else:
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _normalize(x, self.weight, self.bias, self.eps, zero_centered=self.zero_centered)


class DuplicatedLinear(torch.nn.Linear):
    """`TELinear(parallel_mode="duplicated")`: the whole weight on every tensor-parallel rank; returns (out, None)."""

    def __init__(self, input_size, output_size, *, config, init_method, bias, parallel_mode, **_):
        if parallel_mode != "duplicated" or bias:
            raise RefusedError(
                f"TELinear on a CPU got {parallel_mode=}, {bias=}, wanted 'duplicated' and no bias, which is all that "
                "Megatron's sparse attention asks of it; use the column- or row-parallel linear layer."
            )
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """`TELayerNormColumnParallelLinear`: the norm before the projection, its parameters named `layer_norm_*`."""

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = Norm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight = norm.weight
        self.layer_norm_bias = norm.bias

    def forward(self, x: Tensor, *args, **kwargs):
        zero_centered = self.config.layernorm_zero_centered_gamma
        eps = self.config.layernorm_epsilon
        x = _normalize(x, self.layer_norm_weight, self.layer_norm_bias, eps, zero_centered=zero_centered)
        return super().forward(x, *args, **kwargs)


def _zigzag_positions(num_rows: int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a rank's rows in Megatron's zigzag cut, [num_rows]."""
    half = num_rows // 2
    rows = torch.arange(half)
    return torch.cat([rows + cp_rank * half, rows + (2 * cp_size - 1 - cp_rank) * half])


class ContextParallelDotProductAttention(DotProductAttention):
    """Stock `DotProductAttention`, and over a CP group the same after an all-gather of keys and values (zigzag)."""

    def __init__(self, config, *args, pg_collection=None, **kwargs):
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # the base class refuses anything else
        super().__init__(alone, *args, pg_collection=pg_collection, **kwargs)
        self.cp_group = getattr(pg_collection, "cp", None)
        if self.cp_group is None:
            self.cp_group = parallel_state.get_context_parallel_group(check_initialized=False)

    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        if cp_size > 1:
            num_rows = query.shape[0]
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
            own = _zigzag_positions(num_rows, cp_size, self.cp_group.rank())
            every = torch.cat([_zigzag_positions(num_rows, cp_size, rank) for rank in range(cp_size)])
            attention_mask = (own[:, None] < every[None, :])[None, None]
        return super().forward(query, key, value, attention_mask, *args, **kwargs)


class CpuSpecProvider(LocalSpecProvider):
    """`TESpecProvider` with the modules above."""

    def linear(self):
        return DuplicatedLinear

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        return Norm

    def core_attention(self):
        return ContextParallelDotProductAttention


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """`fla.modules.l2norm.l2norm`."""
    return x * torch.rsqrt(x.pow(2).sum(dim, keepdim=True) + eps)


def causal_conv1d(x, weight, bias=None, activation=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """fla's `causal_conv1d` over whole sequences: x [b, t, c], weight [c, w], bias [c]; (out [b, t, c], None)."""
    if initial_state is not None or output_final_state or cu_seqlens is not None:
        raise RefusedError(
            "causal_conv1d on a CPU got a state or packed sequences, wanted whole sequences, since Megatron's own "
            "GatedDeltaNet passes no others; segments with a state go through ops.conv.causal_conv."
        )
    channels, width = weight.shape
    out = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=width - 1, groups=channels)
    out = out[..., : x.shape[1]].transpose(1, 2)
    return (F.silu(out) if activation in ("silu", "swish") else out), None
