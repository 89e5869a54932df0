"""The fused attention kernels against the reference, and the CUDA paths against the contracts of their kernels.

Where there is no GPU, the CUDA operators are stood in for by CPU implementations that hold the caller to what the
real ones demand (layouts, alignment, square causal masks, padded lse), and reach them through the real dispatcher.
"""

import itertools

import pytest
import torch

from longstraw_megatron.functional import attention as reference
from longstraw_megatron.functional.softmax_merge import merge_partials
from longstraw_megatron.ops import attention as ops
from longstraw_megatron.ops.attention import attention_backward, attention_forward, default_kernel

SCALE = 0.3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = [(1, 1), (70, 70), (5, 130), (130, 5), (1, 9), (9, 1)]


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()


def together(tensors):
    return torch.cat([x.double().flatten() for x in tensors])


def make_qkv(num_queries, num_keys, *, num_heads=6, num_key_heads=2, head_dim=16, dtype=torch.float32):
    gen = torch.Generator().manual_seed(4)
    shapes = ((num_queries, num_heads, head_dim), *[(num_keys, num_key_heads, head_dim)] * 2)
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def compare(q, k, v, causal, *, tolerance):
    """Forward and backward of kernel='flash' against the reference in float64 on the same values."""
    options = {"causal": causal, "softmax_scale": SCALE}
    out, lse = attention_forward(q, k, v, **options, kernel="flash")
    want_out, want_lse = reference.attention(q.double(), k.double(), v.double(), **options)
    assert out.dtype == q.dtype and lse.dtype == torch.promote_types(q.dtype, torch.float32)
    assert out.shape == q.shape and lse.shape == q.shape[:2]
    assert relative(out, want_out) <= tolerance and relative(lse, want_lse) <= tolerance
    dout = torch.randn(want_out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    want = reference.attention_backward(dout, q.double(), k.double(), v.double(), want_out, want_lse, **options)
    grads = attention_backward(dout, q, k, v, want_out, want_lse.to(lse.dtype), **options, kernel="flash")
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, q.dtype) for x in (q, k, v)]
    assert relative(together(grads), together(want)) <= tolerance


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_flash_on_cpu(dtype, shape, causal):
    compare(*make_qkv(*shape, dtype=dtype), causal, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", ["flash", "reference"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_or_no_queries(shape, causal, kernel):
    q, k, v = make_qkv(*shape)
    out, lse = attention_forward(q, k, v, causal=causal, softmax_scale=SCALE, kernel=kernel)
    assert out.shape == q.shape and not out.any() and lse.shape == q.shape[:2] and bool((lse == -torch.inf).all())
    lse = torch.zeros_like(lse)  # of other blocks
    grads = attention_backward(out, q, k, v, out, lse, causal=causal, softmax_scale=SCALE, kernel=kernel)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("kernel", ["flash", "reference"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_blocks_merge_and_go_back(dtype, kernel):
    """Key blocks of 64, 0 and 33 rows: merged forward, and per block backward with what was merged."""
    q, k, v = make_qkv(40, 97, dtype=dtype)
    blocks = [(k[a:b], v[a:b]) for a, b in itertools.pairwise((0, 64, 64, 97))]
    options = {"causal": False, "softmax_scale": SCALE}
    out, lse = attention_forward(q, *blocks[0], **options, kernel=kernel)
    for block in blocks[1:]:
        out, lse = merge_partials(out, lse, *attention_forward(q, *block, **options, kernel=kernel))
    dout = torch.randn_like(out)
    want_out, want_lse = reference.attention(q.double(), k.double(), v.double(), **options)
    want = reference.attention_backward(
        dout.double(), q.double(), k.double(), v.double(), want_out, want_lse, **options
    )
    grads = [attention_backward(dout, q, *block, out, lse, **options, kernel=kernel) for block in blocks]
    dq = sum(grad[0].to(lse.dtype) for grad in grads)
    dk, dv = (torch.cat([grad[i] for grad in grads]) for i in (1, 2))
    assert relative(out, want_out) <= TOLERANCE[dtype]
    for got, expected in zip((dq, dk, dv), want, strict=True):
        assert relative(got, expected) <= TOLERANCE[dtype]


def test_views_are_read_as_they_lie():
    """Slices of one projection, rows of a page, heads in front, and a strided head dim, which the kernel misreads."""
    q, k, v = make_qkv(30, 30)
    options = {"causal": True, "softmax_scale": SCALE, "kernel": "flash"}
    want_out, want_lse = attention_forward(q, k, v, **options)
    dout = torch.randn_like(q)
    want = attention_backward(dout, q, k, v, want_out, want_lse, **options)

    def in_projection(x):
        return torch.cat([x, torch.full_like(x, 1e6), x], dim=-1)[..., 32:]

    def in_page(x):
        return torch.cat([x, torch.full_like(x, torch.nan)])[: x.shape[0]]

    def heads_first(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def strided_head_dim(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    for view in (in_projection, in_page, heads_first, strided_head_dim):
        out, lse = attention_forward(*map(view, (q, k, v)), **options)
        assert torch.equal(out, want_out) and torch.equal(lse, want_lse), view.__name__
        grads = attention_backward(*map(view, (dout, q, k, v, out)), heads_first(lse[..., None])[..., 0], **options)
        assert all(map(torch.equal, grads, want)), view.__name__


def test_no_copies_at_the_border():
    q, k, v = make_qkv(30, 30)
    out, lse = attention_forward(q, k, v, causal=True, softmax_scale=SCALE, kernel="flash")
    assert out.is_contiguous() and lse.is_contiguous()
    assert ops._to_kernel(q).data_ptr() == q.data_ptr()


def test_default_kernel():
    assert default_kernel(torch.device("cpu"), torch.float64) == "flash"
    assert default_kernel(torch.device("cuda"), torch.bfloat16) == "flash"
    assert default_kernel(torch.device("cuda"), torch.float64) == "reference"


def _checked(q, k, v, *, grouped):
    """[1, heads, tokens, H] -> [tokens, heads, H] in float64, after the checks that the CUDA kernels make."""
    for x in (q, k, v):
        assert x.dim() == 4 and x.shape[0] == 1 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0
    assert q.shape[1] % k.shape[1] == 0 and (grouped or q.shape[1] == k.shape[1])
    return [x[0].transpose(0, 1).double() for x in (q, k, v)]


def _heads_first(x, like):
    return x.to(like.dtype).transpose(0, 1).unsqueeze(0)


def _cuda_flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert q.dtype in (torch.bfloat16, torch.float16) and dropout_p == 0 and not return_debug_mask
    assert not is_causal or q.shape[2] == k.shape[2]  # bottom-right aligned: only squares mean the same
    out, lse = reference.attention(*_checked(q, k, v, grouped=True), causal=is_causal, softmax_scale=scale)
    empty = torch.empty(0)
    return _heads_first(out, q), lse.float().t()[None], None, None, q.shape[2], k.shape[2], empty, empty, empty


def _cuda_flash_backward(
    dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    assert {x.dtype for x in (dout, k, v, out)} == {q.dtype} and lse.dtype == torch.float32
    assert lse.shape == q.shape[:3] and lse.is_contiguous() and cum_q is None and cum_k is None
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and dropout_p == 0
    assert seed.dtype == offset.dtype == torch.uint64 and (not is_causal or max_q == max_k)
    grads = reference.attention_backward(
        dout[0].transpose(0, 1).double(),
        *_checked(q, k, v, grouped=True),
        out[0].transpose(0, 1).double(),
        lse[0].t().double(),
        causal=is_causal,
        softmax_scale=scale,
    )
    return tuple(_heads_first(grad, q) for grad in grads)


def _cuda_efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0 and q.dtype == torch.float32
    out, lse = reference.attention(*_checked(q, k, v, grouped=False), causal=is_causal, softmax_scale=scale)
    lse = torch.nn.functional.pad(lse.float().t()[None], (0, -q.shape[2] % 32), value=torch.inf)
    return _heads_first(out, q), lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _cuda_efficient_backward(
    dout, q, k, v, attn_bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    assert attn_bias is None and list(mask) == [True, True, True, False] and dropout_p == 0
    assert seed.dtype == offset.dtype == torch.int64
    num_queries = q.shape[2]
    assert lse.shape == (1, q.shape[1], -(-num_queries // 32) * 32) and lse.is_contiguous()
    assert bool((lse[..., num_queries:] == torch.inf).all())
    assert out.transpose(1, 2).is_contiguous()  # the kernel derives its row stride from the shape
    grads = reference.attention_backward(
        dout[0].transpose(0, 1).double(),
        *_checked(q, k, v, grouped=False),
        out[0].transpose(0, 1).double(),
        lse[0, :, :num_queries].t().double(),
        causal=is_causal,
        softmax_scale=scale,
    )
    return *(_heads_first(grad, q) for grad in grads), None


@pytest.fixture
def cuda_operators_on_cpu(monkeypatch):
    """kernel='flash' takes the CUDA branches, whose operators run here on CPU tensors."""
    stand_ins = {
        "_scaled_dot_product_flash_attention": _cuda_flash,
        "_scaled_dot_product_flash_attention_backward": _cuda_flash_backward,
        "_scaled_dot_product_efficient_attention": _cuda_efficient,
        "_scaled_dot_product_efficient_attention_backward": _cuda_efficient_backward,
    }

    def flash_ops(q):
        if q.dtype == torch.float32:
            return ops._efficient_cuda_forward, ops._efficient_cuda_backward
        return ops._flash_cuda_forward, ops._flash_cuda_backward

    monkeypatch.setattr(ops, "_flash_ops", flash_ops)
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in stand_ins.items():
            library.impl(name, function, "CPU")
        yield


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("cuda_operators_on_cpu")
def test_cuda_paths_keep_their_kernels_contracts(dtype, head_dim, shape, causal):
    compare(
        *make_qkv(*shape, head_dim=head_dim, dtype=dtype), causal, tolerance=1e-5 if dtype == torch.float32 else 1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_choice_and_shapes_on_fake_tensors(dtype):
    """The real operators' shape functions accept what is passed on a CUDA device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, dtype=dtype, device="cuda") for x in make_qkv(70, 50, head_dim=12))
        options = {"causal": True, "softmax_scale": SCALE, "kernel": "flash"}
        out, lse = attention_forward(q, k, v, **options)
        assert out.shape == q.shape and out.dtype == dtype and lse.shape == (70, 6) and lse.dtype == torch.float32
        grads = attention_backward(out, q, k, v, out, lse, **options)
        assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]
        with pytest.raises(ValueError, match="use kernel='reference'"):
            attention_forward(q.double(), k.double(), v.double(), **options)
