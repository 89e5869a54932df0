"""Absorbed sparse attention against dense masked softmax in float64, with autograd."""

import math

import pytest
import torch

from longstraw_megatron.functional.softmax_merge import merge_partials
from longstraw_megatron.functional.sparse_attention import sparse_attention, sparse_attention_backward
from longstraw_megatron.testing import largest_tensor, relative_error

NUM_HEADS, LATENT, ROPE = 3, 6, 4
DIM = LATENT + ROPE
CALL = {"softmax_scale": 1 / math.sqrt(DIM), "kv_lora_rank": LATENT}


def make_case(num_queries, num_rows, k, seed=0, missing=0.2):
    """q, rows, index (distinct rows, some -1, the last query without any), dout; float64."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_queries, NUM_HEADS, DIM, dtype=torch.float64, generator=generator)
    rows = torch.randn(num_rows, DIM, dtype=torch.float64, generator=generator)
    index = torch.stack([torch.randperm(num_rows, generator=generator)[:k] for _ in range(num_queries)])
    index.masked_fill_(torch.rand(index.shape, generator=generator) < missing, -1)
    index[-1] = -1
    dout = torch.randn(num_queries, NUM_HEADS, LATENT, dtype=torch.float64, generator=generator)
    return q, rows, index, dout


def dense_attention(q, rows, index):
    """The same by a mask over all rows."""
    chosen = torch.zeros(q.shape[0], rows.shape[0] + 1, dtype=torch.bool).scatter(1, index % (rows.shape[0] + 1), True)
    scores = torch.einsum("tnd,sd->tns", q, rows) * CALL["softmax_scale"]
    scores = scores.masked_fill(~chosen[:, None, :-1], float("-inf"))
    lse = scores.logsumexp(-1)
    probs = (scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]).exp()
    return torch.einsum("tns,sc->tnc", probs, rows[:, :LATENT]), lse


def dense_gradients(q, rows, index, dout):
    q, rows = q.clone().requires_grad_(), rows.clone().requires_grad_()
    (dense_attention(q, rows, index)[0] * dout).sum().backward()
    return q.grad, rows.grad


def run_backward(dout, q, rows, index, out, lse, **kwargs):
    dq = torch.zeros_like(q, dtype=lse.dtype)
    drows = torch.zeros_like(rows, dtype=lse.dtype)
    sparse_attention_backward(
        dout, q, rows, index, out, lse, dq, lambda at, grad: drows.index_add_(0, at, grad), **CALL, **kwargs
    )
    return dq, drows


@pytest.mark.parametrize("num_queries, num_rows, k", [(1, 1, 1), (7, 20, 5), (9, 12, 12), (33, 100, 16)])
@pytest.mark.parametrize("max_elements", [1, 500, 1 << 20])
def test_forward_and_backward(num_queries, num_rows, k, max_elements):
    q, rows, index, dout = make_case(num_queries, num_rows, k)
    index[0] = torch.arange(k)  # at least one row is selected
    out, lse = sparse_attention(q, rows, index, max_elements=max_elements, **CALL)
    want_out, want_lse = dense_attention(q, rows, index)
    assert relative_error(out, want_out) < 1e-14
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    assert torch.allclose(lse[torch.isfinite(lse)], want_lse[torch.isfinite(want_lse)], rtol=0, atol=1e-13)
    dq, drows = run_backward(dout, q, rows, index, out, lse, max_elements=max_elements)
    want_dq, want_drows = dense_gradients(q, rows, index, dout)
    assert (dq - want_dq).norm() <= 1e-13 * dout.norm()
    assert (drows - want_drows).norm() <= 1e-13 * dout.norm()


def test_query_without_rows_gives_zero_and_no_gradient():
    q, rows, index, dout = make_case(4, 10, 3)
    out, lse = sparse_attention(q, rows, index, **CALL)
    assert torch.equal(out[-1], torch.zeros(NUM_HEADS, LATENT, dtype=torch.float64))
    assert torch.isneginf(lse[-1]).all()
    dq, drows = run_backward(dout, q, rows, index, out, lse)
    assert torch.equal(dq[-1], torch.zeros(NUM_HEADS, DIM, dtype=torch.float64))
    assert torch.isfinite(drows).all()


@pytest.mark.parametrize("num_queries, k", [(4, 0), (0, 3)])
def test_nothing_to_do(num_queries, k):
    q, rows = torch.randn(num_queries, NUM_HEADS, DIM), torch.randn(5, DIM)
    index = torch.zeros(num_queries, k, dtype=torch.int64)
    out, lse = sparse_attention(q, rows, index, **CALL)
    assert torch.equal(out, torch.zeros(num_queries, NUM_HEADS, LATENT))
    assert torch.isneginf(lse).all()
    dq, drows = run_backward(torch.randn_like(out), q, rows, index, out, lse)
    assert not dq.any() and not drows.any()


def test_rows_that_no_query_selects_are_not_read():
    q, rows, index, dout = make_case(6, 20, 4)
    index = torch.where(index < 0, index, index % 10)
    rows[10:] = float("nan")
    out, lse = sparse_attention(q, rows, index, **CALL)
    dq, drows = run_backward(dout, q, rows, index, out, lse)
    for tensor in (out, dq, drows):
        assert torch.isfinite(tensor).all()
    assert not drows[10:].any()


def test_partials_merge_and_their_backwards_add_up():
    """The selection cut over three tables, one of them empty for every query; given only the merged out and lse."""
    q, rows, index, dout = make_case(12, 40, 9, seed=3)
    cuts = [(0, 15), (15, 15), (15, 40)]
    parts = [(rows[a:b], torch.where((index >= a) & (index < b), index - a, -1), slice(a, b)) for a, b in cuts]
    out, lse = sparse_attention(q, rows[:0].new_zeros(1, DIM), torch.full((12, 1), -1), **CALL)
    for table, at, _ in parts:
        if table.shape[0]:
            out, lse = merge_partials(out, lse, *sparse_attention(q, table, at, **CALL))
    assert relative_error(out, dense_attention(q, rows, index)[0]) < 1e-14
    want_dq, want_drows = dense_gradients(q, rows, index, dout)
    dq, drows = torch.zeros_like(q), torch.zeros_like(rows)
    for table, at, place in parts:
        if table.shape[0]:
            part_dq, drows[place] = run_backward(dout, q, table, at, out, lse)
            dq += part_dq
    assert relative_error(dq, want_dq) < 1e-13
    assert relative_error(drows, want_drows) < 1e-13


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_precision(dtype, tolerance):
    q, rows, index, dout = (x.to(dtype) if x.is_floating_point() else x for x in make_case(16, 60, 8))
    out, lse = sparse_attention(q, rows, index, **CALL)
    assert out.dtype == lse.dtype == torch.float32
    dq, drows = run_backward(dout, q, rows, index, out.to(dtype), lse)
    exact = [x.double() for x in (q, rows)]
    want = (dense_attention(*exact, index)[0], *dense_gradients(*exact, index, dout.double()))
    for got, reference in zip((out, dq, drows), want, strict=True):
        assert relative_error(got, reference) < tolerance


def test_no_tensor_grows_with_queries_times_rows():
    q, rows, index, dout = make_case(16, 4096, 8)
    with largest_tensor() as largest:
        out, lse = sparse_attention(q, rows, index, max_elements=400, **CALL)
        run_backward(dout, q, rows, index, out, lse, max_elements=400)
    assert largest.nbytes <= rows.nbytes, largest  # the table's gradient; T * S numbers would be 16 * 4096
