"""Softmax attention over one block of keys, by PyTorch's own fused kernels or by the readable reference.

T queries, S keys, N query heads, G key heads, H head dim (the same for q, k and v). At our border tensors are
q, out [T, N, H], k, v [S, G, H], lse [T, N]; the kernels want [1, heads, tokens, H], a view of the same memory.

    kernel="flash"      CPU: flash, all dtypes. CUDA: flash in bfloat16 and float16, memory-efficient in float32.
    kernel="reference"  `functional.attention`, everywhere; makes the [T, S] scores.

Backward takes the out and lse of the whole softmax, of which k, v may be one block.
"""

from typing import Literal

import torch
from torch import Tensor

from longstraw_megatron.functional import attention as reference

Kernel = Literal["flash", "reference"]
_aten = torch.ops.aten
_HEAD_DIM_MULTIPLE = 8  # CUDA flash demands it; the memory-efficient kernel wants aligned rows
_LSE_MULTIPLE = 32  # the memory-efficient backward loads lse in blocks of 32 rows


def default_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The fastest kernel that exists for this device and dtype."""
    return "reference" if device.type != "cpu" and dtype == torch.float64 else "flash"


def _to_kernel(x: Tensor) -> Tensor:
    """[T, heads, ...] -> [1, heads, T, ...], a view; but the CPU kernel misreads a strided head dim."""
    if x.dim() == 3 and x.stride(-1) != 1:
        x = x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def _from_kernel(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)


def _flash_cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = map(_to_kernel, (q, k, v))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return _from_kernel(out), _from_kernel(lse)


def _flash_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = map(_to_kernel, (dout, q, k, v, out, lse))
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return tuple(map(_from_kernel, grads))


def _pad_head_dim(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zeros behind the head dim up to a multiple of 8: scores and the first H columns of everything stay."""
    padding = -tensors[0].shape[-1] % _HEAD_DIM_MULTIPLE
    return tuple(torch.nn.functional.pad(x, (0, padding)) for x in tensors) if padding else tensors


def _flash_cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    head_dim = q.shape[-1]
    q, k, v = map(_to_kernel, _pad_head_dim(q, k, v))
    out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    return _from_kernel(out)[..., :head_dim], _from_kernel(lse)


def _flash_cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    head_dim, num_queries, num_keys = q.shape[-1], q.shape[0], k.shape[0]
    dout, q, k, v, out = map(_to_kernel, _pad_head_dim(dout, q, k, v, out))
    rng = torch.empty(2, dtype=torch.uint64, device=q.device)  # read only with dropout
    # lse is read by pointer, as [1, N, T]. No cumulative lengths: one dense sequence.
    grads = _aten._scaled_dot_product_flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        _to_kernel(lse).contiguous(),
        None,
        None,
        num_queries,
        num_keys,
        0.0,
        causal,
        rng,
        rng[0],
        scale=scale,
    )
    return tuple(_from_kernel(grad)[..., :head_dim] for grad in grads)


def _expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """[S, G, H] -> [S, N, H]: the memory-efficient kernel knows no grouped heads."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, num_key_heads: int) -> Tensor:
    return x if x.shape[1] == num_key_heads else x.unflatten(1, (num_key_heads, -1)).sum(2)


def _efficient_cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    num_queries, num_heads, head_dim = q.shape
    q, k, v = map(_to_kernel, _pad_head_dim(q, _expand_heads(k, num_heads), _expand_heads(v, num_heads)))
    out, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    return _from_kernel(out)[..., :head_dim], _from_kernel(lse)[:num_queries]  # lse comes padded to 32 rows


def _efficient_cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_queries, num_heads, head_dim = q.shape
    num_key_heads = k.shape[1]
    k, v = _expand_heads(k, num_heads), _expand_heads(v, num_heads)
    # The kernel derives the row stride of `out` from its shape, and takes dout contiguous: both as [1, T, N, H].
    dout, q, k, v, out = _pad_head_dim(dout.contiguous(), q, k, v, out.contiguous())
    lse = _to_kernel(lse)  # rows behind the last one are +inf, as forward leaves them: exp(score - inf) = 0
    lse = torch.nn.functional.pad(lse, (0, -num_queries % _LSE_MULTIPLE), value=float("inf")).contiguous()
    dout, q, k, v, out = map(_to_kernel, (dout, q, k, v, out))
    rng = torch.zeros((), dtype=torch.int64, device=q.device)  # read only with dropout
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, rng, rng, 0.0, [True, True, True, False], causal, scale=scale
    )
    dq, dk, dv = (_from_kernel(grad)[..., :head_dim] for grad in (dq, dk, dv))
    return dq, _sum_heads(dk, num_key_heads), _sum_heads(dv, num_key_heads)


def _flash_ops(q: Tensor):
    """(forward, backward) of the fused kernel for q's device and dtype; causal only for as many keys as queries."""
    if q.device.type == "cpu":
        return _flash_cpu_forward, _flash_cpu_backward
    if q.dtype in (torch.bfloat16, torch.float16):
        return _flash_cuda_forward, _flash_cuda_backward
    if q.dtype == torch.float32:
        return _efficient_cuda_forward, _efficient_cuda_backward
    raise ValueError(
        f"kernel='flash' got {q.dtype} on {q.device}, wanted float32, bfloat16 or float16: use kernel='reference'"
    )


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], (q.shape, k.shape, v.shape)
    assert k.shape[:2] == v.shape[:2] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape, v.shape)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, N, H] over k, v [S, G, H]; `causal` is aligned at the top left (query i sees keys 0..i).

    Returns out [T, N, H] in q's dtype and lse [T, N] float32 (float64 for float64), which
    `functional.softmax_merge.merge_partials` takes as they are. No keys: out = 0, lse = -inf. No autograd.
    """
    _check(q, k, v)
    if kernel == "reference":
        return reference.attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    num_queries, num_keys = q.shape[0], k.shape[0]
    if num_queries == 0 or num_keys == 0:  # the CPU kernel divides by both and dies
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        return torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"), dtype=lse_dtype)
    forward, _ = _flash_ops(q)
    if not causal or num_queries == num_keys:
        return forward(q, k, v, causal, softmax_scale)
    # CUDA flash aligns a causal mask at the bottom right, so only squares go there.
    square = min(num_queries, num_keys)
    out, lse = forward(q[:square], k[:square], v[:square], True, softmax_scale)
    if square < num_queries:
        rest_out, rest_lse = forward(q[square:], k, v, False, softmax_scale)
        out, lse = torch.cat([out, rest_out]), torch.cat([lse, rest_lse])
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq [T, N, H], dk [S, G, H], dv [S, G, H]) of one block of keys of a larger softmax, in q's dtype.

    out [T, N, H] and lse [T, N] are the merged ones over all blocks; out and dout may have any dtype and are cast to
    q's. dq is this block's part: sum it over the blocks, in float32.
    """
    _check(q, k, v)
    if kernel == "reference":
        return reference.attention_backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=softmax_scale)
    num_queries, num_keys = q.shape[0], k.shape[0]
    if num_queries == 0 or num_keys == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dout, out = dout.to(q.dtype), out.to(q.dtype)
    _, backward = _flash_ops(q)
    if not causal or num_queries == num_keys:
        return backward(dout, q, k, v, out, lse, causal, softmax_scale)
    square = min(num_queries, num_keys)
    head = [x[:square] for x in (dout, q, k, v, out, lse)]
    dq, dk, dv = backward(*head, True, softmax_scale)
    if square < num_queries:
        rest_dq, rest_dk, rest_dv = backward(
            dout[square:], q[square:], k, v, out[square:], lse[square:], False, softmax_scale
        )
        return torch.cat([dq, rest_dq]), dk + rest_dk, dv + rest_dv
    unseen = torch.zeros_like(k[square:])
    return dq, torch.cat([dk, unseen]), torch.cat([dv, unseen])
