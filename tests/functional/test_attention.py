"""Reference attention against PyTorch's own, and its block-wise backward against autograd of the whole."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from longstraw_megatron.functional.attention import attention, attention_backward
from longstraw_megatron.functional.softmax_merge import merge_partials

SCALE = 0.3


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()


def make_qkv(num_queries, num_keys, *, num_heads=6, num_key_heads=2, head_dim=8, dtype=torch.float64):
    gen = torch.Generator().manual_seed(2)
    shapes = ((num_queries, num_heads, head_dim), *[(num_keys, num_key_heads, head_dim)] * 2)
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def torch_attention(q, k, v, *, causal):
    """F.scaled_dot_product_attention on explicitly repeated heads, with an explicit mask."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    mask = torch.arange(k.shape[0])[None] <= torch.arange(q.shape[0])[:, None] if causal else None
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=SCALE)[0].transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (7, 7), (5, 12), (12, 5), (1, 9)])
def test_equals_torch(num_queries, num_keys, causal):
    q, k, v = make_qkv(num_queries, num_keys)
    out, lse = attention(q, k, v, causal=causal, softmax_scale=SCALE)
    want = torch_attention(q, k, v, causal=causal)
    assert relative(out, want) <= 1e-13
    dout = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, (q, k, v), dout)
    grads = attention_backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=SCALE)
    # Against the norm of all three: with a single visible key the true dq and dk are 0.
    assert relative(*(torch.cat([x.flatten() for x in xs]) for xs in (grads, want_grads))) <= 1e-12
    assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


def test_lse_is_the_log_of_the_summed_exponentials():
    q, k, v = make_qkv(3, 4, num_heads=2, num_key_heads=1)
    _, lse = attention(q, k, v, causal=False, softmax_scale=SCALE)
    want = [[sum(torch.exp(SCALE * q[t, n] @ k[s, 0]) for s in range(4)).log() for n in range(2)] for t in range(3)]
    torch.testing.assert_close(lse, torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("cuts", [(4, 11), (0, 8), (8, 8), (8, 20)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_backward_of_each_block_with_merged_out_and_lse(cuts, dtype, tolerance):
    """Three blocks of keys, one of which may be empty, and the queries' own causal block."""
    q, k, v = make_qkv(9, 20, dtype=dtype)
    _, k_own, v_own = make_qkv(9, 9, dtype=dtype)

    mask = torch.cat([torch.ones(9, 20), torch.ones(9, 9).tril()], dim=1).bool()
    all_k, all_v = (torch.cat(x).repeat_interleave(3, dim=1).transpose(0, 1) for x in ((k, k_own), (v, v_own)))
    want = F.scaled_dot_product_attention(q.transpose(0, 1), all_k, all_v, attn_mask=mask, scale=SCALE).transpose(0, 1)
    dout = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, (q, k, v, k_own, v_own), dout)

    blocks = [(k[a:b], v[a:b], False) for a, b in itertools.pairwise((0, *cuts, 20))] + [(k_own, v_own, True)]
    out, lse = torch.zeros_like(want), torch.full(q.shape[:2], -torch.inf, dtype=dtype)
    for k_block, v_block, causal in blocks:
        out, lse = merge_partials(out, lse, *attention(q, k_block, v_block, causal=causal, softmax_scale=SCALE))
    assert relative(out, want) <= tolerance

    grads = [
        attention_backward(dout, q, k_block, v_block, out, lse, causal=causal, softmax_scale=SCALE)
        for k_block, v_block, causal in blocks
    ]
    dq = sum(grad[0] for grad in grads)
    dk, dv = (torch.cat([grad[i] for grad in grads[:-1]]) for i in (1, 2))
    got = (dq, dk, dv, *grads[-1][1:])
    errors = [relative(a, b) for a, b in zip(got, want_grads, strict=True)]
    assert max(errors) <= tolerance, errors


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend(num_queries, num_keys):
    q, k, v = (x.detach() for x in make_qkv(num_queries, num_keys))
    out, lse = attention(q, k, v, causal=False, softmax_scale=SCALE)
    assert out.shape == q.shape and not out.any() and bool((lse == -torch.inf).all()) and lse.shape == q.shape[:2]
    grads = attention_backward(torch.ones_like(out), q, k, v, out, lse, causal=False, softmax_scale=SCALE)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape and not grad.any()


def test_dtypes():
    q, k, v = make_qkv(3, 4, dtype=torch.bfloat16)
    out, lse = attention(q, k, v, causal=True, softmax_scale=SCALE)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    grads = attention_backward(out.float(), q, k, v, out.float(), lse, causal=True, softmax_scale=SCALE)
    assert {grad.dtype for grad in grads} == {torch.bfloat16}
