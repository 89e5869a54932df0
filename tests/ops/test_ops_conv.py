"""Dispatch of the causal convolution; fla is stood in for by a module with its signature where it is not installed."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from longstraw_megatron.functional.causal_conv import causal_conv as reference
from longstraw_megatron.ops.conv import causal_conv


@pytest.fixture
def fla_calls(monkeypatch):
    """A stand-in `fla.modules.convolution` whose calls are recorded: zero padding before the first row."""
    calls = []

    def causal_conv1d(x, weight=None, bias=None, **kwargs):
        assert not kwargs
        calls.append(x.shape[1])
        taps = weight.shape[1]
        return F.conv1d(F.pad(x.mT, (taps - 1, 0)), weight.unsqueeze(1), bias, groups=weight.shape[0]).mT, None

    module = types.ModuleType("fla.modules.convolution")
    module.causal_conv1d = causal_conv1d
    for name in ("fla", "fla.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.modules.convolution", module)
    return calls


@pytest.mark.parametrize("kernel", ["torch", "fla"])
@pytest.mark.parametrize(
    ("num_tokens", "valid"), [(0, None), (1, None), (2, None), (40, None), (40, 0), (40, 2), (40, 37)]
)
def test_same_result_and_gradients_by_either_kernel(num_tokens, valid, kernel, fla_calls):
    gen = torch.Generator().manual_seed(7)
    shapes = ((2, num_tokens, 6), (2, 3, 6), (6, 4), (6,))
    inputs = [torch.randn(shape, generator=gen, dtype=torch.float64).requires_grad_() for shape in shapes]
    results = []
    for conv, options in ((causal_conv, {"kernel": kernel}), (reference, {})):
        outputs = conv(*inputs, valid=valid, **options)
        grads = torch.autograd.grad(outputs, inputs, [torch.arange(x.numel()).view(x.shape) * 0.1 for x in outputs])
        results.append([*outputs, *grads])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert fla_calls == ([num_tokens + 3] if kernel == "fla" and num_tokens else [])
    assert results[0][1].untyped_storage().nbytes() == results[0][1].nbytes  # a tail keeps no segment alive
