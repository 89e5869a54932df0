"""The convolution with a tail against F.conv1d: outputs, tails and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from longstraw_megatron.functional.causal_conv import causal_conv

BATCH, CHANNELS = 2, 5


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()


def make_inputs(num_tokens, taps=4, dtype=torch.float64):
    gen = torch.Generator().manual_seed(3)
    shapes = ((BATCH, num_tokens, CHANNELS), (BATCH, taps - 1, CHANNELS), (CHANNELS, taps), (CHANNELS,))
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def by_conv1d(rows, tail, weight, bias=None, *, valid=None):
    extended = torch.cat([tail, rows], dim=1)
    valid = rows.shape[1] if valid is None else valid
    new_tail = extended[:, valid : valid + tail.shape[1]]
    if rows.shape[1] == 0:
        return rows, new_tail
    return F.conv1d(extended.mT, weight.unsqueeze(1), bias, groups=weight.shape[0]).mT, new_tail


def run(conv, inputs, *, uses=("out", "tail"), **kwargs):
    loss, outputs = 0.0, conv(*inputs, **kwargs)
    for name, x in zip(("out", "tail"), outputs, strict=True):
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
        loss = loss + (x * weight.to(x.dtype)).sum() if name in uses else loss
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))]


def assert_close(got, want, tolerance):
    names = ("out", "new_tail", "rows", "tail", "weight", "bias")
    assert [a.shape for a in got] == [b.shape for b in want]
    errors = {name: relative(a, b) for name, a, b in zip(names, got, want, strict=False)}
    assert max(errors.values()) <= tolerance, errors


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 63])
def test_equals_conv1d(num_tokens, taps):
    inputs = make_inputs(num_tokens, taps)
    assert_close(run(causal_conv, inputs), run(by_conv1d, inputs), 1e-13)
    assert_close(run(causal_conv, inputs[:3]), run(by_conv1d, inputs[:3]), 1e-13)


def test_zero_tail_is_padding():
    rows, tail, weight, bias = make_inputs(10)
    out, _ = causal_conv(rows, torch.zeros_like(tail), weight, bias)
    want = F.conv1d(rows.mT, weight.unsqueeze(1), bias, groups=CHANNELS, padding=3).mT[:, :10]
    assert relative(out, want) <= 1e-13


@pytest.mark.parametrize("uses", [("out",), ("tail",)])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_one_output_unused(uses, num_tokens):
    inputs = make_inputs(num_tokens)
    assert_close(run(causal_conv, inputs, uses=uses), run(by_conv1d, inputs, uses=uses), 1e-13)


@pytest.mark.parametrize("valid", [0, 1, 2, 5, 9])
def test_padding_is_not_in_the_tail(valid):
    inputs = make_inputs(9)
    assert_close(run(causal_conv, inputs, valid=valid), run(by_conv1d, inputs, valid=valid), 1e-13)


@pytest.mark.parametrize("cuts", [(1,), (4,), (1, 2, 3), (2, 2, 10), (0, 12)])
def test_cut_anywhere_and_carry_the_tail(cuts):
    inputs = make_inputs(12)

    def in_pieces(rows, tail, weight, bias):
        outs, bounds = [], (0, *cuts, 12)
        for start, stop in zip(bounds, bounds[1:], strict=False):
            out, tail = causal_conv(rows[:, start:stop], tail, weight, bias)
            outs.append(out)
        return torch.cat(outs, dim=1), tail

    assert_close(run(in_pieces, inputs), run(causal_conv, inputs), 1e-13)


def test_frozen_weight_and_no_grad():
    rows, tail, weight, bias = make_inputs(6)
    want = run(by_conv1d, [rows, tail, weight, bias])
    out, new_tail = causal_conv(rows, tail, weight.detach(), bias.detach())
    assert out.requires_grad and new_tail.requires_grad
    with torch.no_grad():
        out, new_tail = causal_conv(rows, tail, weight, bias)
    assert_close([out, new_tail], want[:2], 1e-13)
    assert not out.requires_grad


def test_new_tail_owns_its_memory():
    """It is kept per segment boundary: a view would keep the whole segment."""
    rows, tail, weight, _ = (x.detach() for x in make_inputs(50))
    _, new_tail = causal_conv(rows, tail, weight)
    assert new_tail.untyped_storage().nbytes() == new_tail.nbytes and torch.equal(new_tail, rows[:, -3:])


def test_bfloat16_sums_taps_in_float32():
    inputs = make_inputs(40, dtype=torch.bfloat16)
    double = [x.detach().double().requires_grad_() for x in inputs]
    got = run(causal_conv, inputs)
    assert {x.dtype for x in got} == {torch.bfloat16}
    assert_close(got, run(by_conv1d, double), 4e-3)  # one rounding to 8 bits at the end


def test_strided_rows():
    base = torch.randn(1, 12, 3 * CHANNELS, dtype=torch.float64)
    _, tail, weight, bias = make_inputs(12)
    rows = base[..., CHANNELS : 2 * CHANNELS]
    out, _ = causal_conv(rows, tail[:1], weight, bias)
    assert relative(out, by_conv1d(rows.contiguous(), tail[:1], weight, bias)[0]) <= 1e-13
