"""Merging partial attentions equals attention over all keys at once, empty sets included."""

import itertools

import pytest
import torch

from longstraw_megatron.functional.attention import attention
from longstraw_megatron.functional.softmax_merge import merge_partials

SCALE = 0.3


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def make_qkv(num_queries=9, num_keys=20, dtype=torch.float64):
    gen = torch.Generator().manual_seed(1)
    shapes = ((num_queries, 4, 8), (num_keys, 2, 8), (num_keys, 2, 8))
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("cuts", [(7, 15), (0, 9), (9, 9), (9, 20), (0, 0), (20, 20)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_three_blocks_in_any_order(cuts, dtype, tolerance):
    q, k, v = make_qkv(dtype=dtype)
    want_out, want_lse = attention(q, k, v, causal=False, softmax_scale=SCALE)
    bounds = (0, *cuts, 20)
    parts = [attention(q, k[a:b], v[a:b], causal=False, softmax_scale=SCALE) for a, b in itertools.pairwise(bounds)]
    for order in itertools.permutations(parts):
        out, lse = order[0]
        for part in order[1:]:
            out, lse = merge_partials(out, lse, *part)
        assert out.dtype == lse.dtype == dtype
        assert relative(out, want_out) <= tolerance and relative(lse, want_lse) <= tolerance


def test_both_sets_empty():
    out, lse = torch.zeros(3, 2, 4), torch.full((3, 2), float("-inf"))
    merged_out, merged_lse = merge_partials(out, lse, out, lse)
    assert torch.equal(merged_out, out) and torch.equal(merged_lse, lse)


def test_empty_for_some_rows_only():
    out_a, out_b = torch.randn(4, 1, 3), torch.randn(4, 1, 3)
    lse_a, lse_b = torch.tensor([[0.0], [1.0], [-torch.inf], [-torch.inf]]), torch.tensor([[2.0], [-torch.inf]] * 2)
    out_a[2:], out_b[1::2] = 0, 0
    out, lse = merge_partials(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(lse[0, 0], torch.tensor(2.0).exp().add(1).log())
    weight_a = 1 / (1 + torch.tensor(2.0).exp())
    torch.testing.assert_close(out[0], weight_a * out_a[0] + (1 - weight_a) * out_b[0])
    assert torch.equal(out[1], out_a[1]) and lse[1] == 1
    assert torch.equal(out[2], out_b[2]) and lse[2] == 2
    assert not out[3].any() and lse[3] == -torch.inf


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_extreme_lse(shift):
    """One set outweighs the other by far more than a float holds."""
    out_a, out_b = torch.randn(2, 1, 3), torch.randn(2, 1, 3)
    lse_a = torch.zeros(2, 1)
    out, lse = merge_partials(out_a, lse_a, out_b, lse_a + shift)
    assert torch.equal(out, out_b if shift > 0 else out_a) and torch.equal(lse, (lse_a + shift).clamp_min(0))


def test_bfloat16_partials_merge_in_float32():
    q, k, v = make_qkv(dtype=torch.bfloat16)
    (out_a, lse_a), (out_b, lse_b) = (
        attention(q, k[part], v[part], causal=False, softmax_scale=SCALE) for part in (slice(6), slice(6, 20))
    )
    assert out_a.dtype == torch.bfloat16 and lse_a.dtype == torch.float32
    out, lse = merge_partials(out_a, lse_a, out_b, lse_b)
    want, _ = merge_partials(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    assert out.dtype == lse.dtype == torch.float32
    assert relative(out, want) <= 1e-6
