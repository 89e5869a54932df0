"""Stand-ins for GPU kernels in a dry run: they make the tensors that the kernel makes, keep what it keeps for backward,
and compute nothing.

A dry run has meta tensors. `gpu_kernels()` puts these where the code would reach a kernel of Transformer
Engine, flash-linear-attention or FlashAttention on a GPU; everything else runs as it is. Shapes as at the places that
they stand in for.
"""

import functools

import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.autograd import Function

from longstraw_megatron.functional import sparse_attention as functional_sparse
from longstraw_megatron.functional import topk as functional_topk
from longstraw_megatron.mcore import cpu_modules
from longstraw_megatron.mcore import model as mcore_model
from longstraw_megatron.mcore.patching import Patch
from longstraw_megatron.ops import attention as ops_attention
from longstraw_megatron.ops import conv as ops_conv
from longstraw_megatron.ops import delta_rule as ops_delta_rule
from longstraw_megatron.segments import logprobs as segment_logprobs
from longstraw_megatron.segments import sparse_attention as segment_sparse

CHUNK = 64  # tokens of a chunk in fla's chunk_gated_delta_rule
FLASH_ROWS = 128  # FlashAttention rounds queries up to it


class _Norm(Function):
    """Transformer Engine's RMSNorm or LayerNorm: keeps its input and one float32 per row."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        ctx.has_bias = bias is not None
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight) if ctx.has_bias else None


def _normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool) -> Tensor:
    return _Norm.apply(x, weight, bias)


class _CausalConv(Function):
    """fla's causal_conv1d without activation."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight)


def _causal_conv(rows: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, valid: int) -> tuple[Tensor, Tensor]:
    num_tail = tail.shape[1]
    extended = torch.cat([tail, rows], dim=1)
    out = _CausalConv.apply(extended, weight)
    return out[:, num_tail:], extended[:, valid : valid + num_tail].contiguous()


class _DeltaRule(Function):
    """The buffers of fla 0.6.0's chunk_gated_delta_rule (fla/ops/gated_delta_rule/chunk.py:28-205)."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state):
        batch, num_tokens, num_heads, key_dim = k.shape
        num_chunks, value_dim = -(-num_tokens // CHUNK), v.shape[-1]
        decay = torch.empty_like(g, dtype=torch.float32)
        inverse = k.new_empty(batch, num_tokens, num_heads, CHUNK)
        _w, _u = torch.empty_like(k), torch.empty_like(v)
        _states = k.new_empty(batch, num_chunks, num_heads, key_dim, value_dim)
        _written = torch.empty_like(v)
        final_state = torch.empty(batch, num_heads, key_dim, value_dim, dtype=torch.float32)
        out = torch.empty_like(v)
        ctx.save_for_backward(q, k, v, decay, beta, inverse, initial_state)
        return out, final_state

    @staticmethod
    def backward(ctx, dout, dfinal_state):
        q, k, v, decay, beta, inverse, initial_state = ctx.saved_tensors
        num_chunks = -(-k.shape[1] // CHUNK)
        _w, _u, _written = torch.empty_like(k), torch.empty_like(v), torch.empty_like(v)
        states = k.new_empty(k.shape[0], num_chunks, *k.shape[2:], v.shape[-1])
        _dv_local, _dstates, _dv = torch.empty_like(v), torch.empty_like(states), torch.empty_like(v)
        dq, _dk, _dw, _dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k), torch.empty_like(decay)
        dk, dv, dbeta, dg = torch.empty_like(k), torch.empty_like(v), torch.empty_like(beta), torch.empty_like(decay)
        return dq, dk, dv, dg, dbeta, None if initial_state is None else torch.empty_like(initial_state)


def _delta_rule(q, k, v, g, beta, initial_state) -> tuple[Tensor, Tensor]:
    return _DeltaRule.apply(q, k, v, g, beta, initial_state)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), _float32_lse(q)


def _float32_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[1], q.shape[0], dtype=torch.float32).transpose(0, 1)


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention 2: a float32 sum of dq and, for grouped heads, dk and dv of every query head."""
    num_queries, num_heads, head_dim = q.shape
    padded = -(-num_queries // FLASH_ROWS) * FLASH_ROWS
    _lse = lse.contiguous()
    _dq_sum = torch.empty(num_heads, padded, head_dim, dtype=torch.float32)
    _delta = torch.empty(num_heads, padded, dtype=torch.float32)
    if k.shape[1] != num_heads:
        _expanded = [k.new_empty(k.shape[0], num_heads, head_dim) for _ in range(2)]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.promote_types(a.dtype, torch.float32))


def _add_outer(accumulator: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    low = grad_logits.to(hidden.dtype).T
    for rows in segment_logprobs._blocks(low.shape[0], segment_logprobs.WEIGHT_ROWS):
        accumulator[rows] += torch.empty_like(accumulator[rows])


def gpu_kernels() -> list[Patch]:
    """What runs as a kernel on a GPU, and as something else on a CPU."""
    reason = "a kernel of the GPU makes other tensors than the CPU's code"
    flash = lambda q: (_flash_forward, _flash_backward)  # noqa: E731
    return [
        Patch(mcore_model, "default_kernel", lambda device: "fla", reason),
        Patch(cpu_modules, "_normalize", _normalize, reason),
        Patch(ops_conv, "_fla_causal_conv", _causal_conv, reason),
        Patch(ops_delta_rule, "_fla_gated_delta_rule", _delta_rule, reason),
        Patch(ops_attention, "_flash_ops", flash, reason),
        Patch(functional_topk, "matmul_float32", _matmul_float32, reason),
        Patch(functional_sparse, "matmul_float32", _matmul_float32, reason),
        Patch(segment_logprobs, "_add_outer", _add_outer, reason),
    ]


def cpu_kernels() -> list[Patch]:
    """PyTorch's own attention kernels for a CPU, whose outputs meta tensors know."""
    flash = lambda q: (ops_attention._flash_cpu_forward, ops_attention._flash_cpu_backward)  # noqa: E731
    tiling = functools.partial(ops_delta_rule.default_tiling, torch.device("cpu"))
    reason = "it asks for the device"
    return [
        Patch(ops_attention, "_flash_ops", flash, reason),
        Patch(ops_delta_rule, "default_tiling", lambda device, head_dims: tiling(head_dims), reason),
    ]


class _Rows(Function):
    """A permutation of rows, or a sum of some: [n, ...] -> [m, ...]."""

    @staticmethod
    def forward(ctx, x, num_rows):
        ctx.shape = x.shape
        return x.new_empty(num_rows, *x.shape[1:])

    @staticmethod
    def backward(ctx, grad):
        return grad.new_empty(ctx.shape), None


class _Chosen(Function):
    """The chosen entries of a map [n, experts], [m]."""

    @staticmethod
    def forward(ctx, probs, num_chosen):
        ctx.shape = probs.shape
        return probs.new_empty(num_chosen)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_empty(ctx.shape), None


def _permute(tokens, routing_map, probs=None, num_out_tokens=None, **_):
    chosen = None if probs is None else _Chosen.apply(probs, num_out_tokens)
    order = torch.empty(num_out_tokens, dtype=torch.int64)
    return _Rows.apply(tokens, num_out_tokens), chosen, order, None, None


def _unpermute(tokens, order, restore_shape, **_):
    return _Rows.apply(tokens, restore_shape[0])


def _sort_chunks(tokens, split_sizes, order, probs=None, **_):
    return _Rows.apply(tokens, len(tokens)), None if probs is None else _Rows.apply(probs, len(probs))


def _preprocess(self, routing_map: Tensor) -> "torch.Tensor":
    """Every expert gets equally many tokens, to within one; sizes are known numbers."""
    import numpy as np

    def even(total: int, parts: int) -> list[int]:
        return [total // parts + (i < total % parts) for i in range(parts)]

    self.num_out_tokens = routing_map.shape[0] * self.config.moe_router_topk
    self.input_splits = even(self.num_out_tokens, self.ep_size)
    mine = self.input_splits[self.ep_group.rank()]
    self.output_splits = [mine] * self.ep_size
    self.output_splits_tp = np.array([mine * self.ep_size] * self.tp_size)
    self.num_global_tokens_per_local_expert = np.zeros((self.ep_size * self.tp_size, self.num_local_experts), int)
    self.cuda_sync_point = "no_sync"
    return np.array(even(mine * self.ep_size * self.tp_size, self.num_local_experts))


def even_routing() -> list[Patch]:
    """Which token goes to which expert is a value, and nobody knows it: all experts get equally many."""
    reason = "sizes that depend on values (moe/token_dispatcher.py:482, moe/moe_utils.py:337)"
    return [
        Patch(token_dispatcher.MoEAlltoAllTokenDispatcher, "preprocess", _preprocess, reason),
        Patch(token_dispatcher, "permute", _permute, reason),
        Patch(token_dispatcher, "unpermute", _unpermute, reason),
        Patch(token_dispatcher, "sort_chunks_by_idxs", _sort_chunks, reason),
        Patch(segment_sparse, "pack_index", lambda index: index, "a width that depends on values: all may be here"),
    ]
