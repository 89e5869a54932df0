"""Dispatch of the gated delta rule; fla is stood in for by a module with its signature where it is not installed."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from longstraw_megatron.functional.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from longstraw_megatron.ops.delta_rule import default_kernel, default_tiling, gated_delta_rule


def make_inputs(num_tokens, dtype=torch.float32):
    gen = torch.Generator().manual_seed(6)
    q, k = (F.normalize(torch.randn(1, num_tokens, 2, 8, generator=gen), dim=-1) for _ in range(2))
    v, state = torch.randn(1, num_tokens, 2, 4, generator=gen), torch.randn(1, 2, 8, 4, generator=gen)
    g, beta = -torch.rand(1, num_tokens, 2, generator=gen), torch.rand(1, num_tokens, 2, generator=gen)
    return [x.to(dtype) for x in (q, k, v, g, beta)], state


@pytest.fixture
def fla_calls(monkeypatch):
    """A stand-in `fla.ops.gated_delta_rule` whose calls are recorded."""
    calls = []

    def fla_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **kwargs):
        assert not kwargs and output_final_state and scale == k.shape[-1] ** -0.5
        calls.append(k.shape[1])
        return recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state)

    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = fla_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    return calls


@pytest.mark.parametrize("kernel", ["torch", "fla"])
@pytest.mark.parametrize("num_tokens", [0, 1, 65])
def test_same_result_by_either_kernel(num_tokens, kernel, fla_calls):
    inputs, state = make_inputs(num_tokens)
    out, final = gated_delta_rule(*inputs, initial_state=state, kernel=kernel)
    want_out, want_final = recurrent_gated_delta_rule(*inputs, initial_state=state)
    torch.testing.assert_close(out, want_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final, want_final, rtol=1e-5, atol=1e-6)
    assert fla_calls == ([num_tokens] if kernel == "fla" and num_tokens else [])


def test_torch_kernel_is_the_chunked_rule():
    inputs, state = make_inputs(70)
    got = gated_delta_rule(*inputs, initial_state=state, kernel="torch")
    tiling = default_tiling(torch.device("cpu"), inputs[1].shape[-1] + inputs[2].shape[-1])
    assert all(map(torch.equal, got, chunk_gated_delta_rule(*inputs, initial_state=state, tiling=tiling)))


def test_tiling_by_device_and_head_dims():
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert [default_tiling(cpu, dims).chunk_size for dims in (128, 129)] == [32, 64]
    assert default_tiling(cpu, 8).block_elements < default_tiling(other, 8).block_elements


def test_fla_refuses_float64(fla_calls):
    inputs, _ = make_inputs(3, torch.float64)
    with pytest.raises(ValueError, match="got float64, .* use kernel='torch'"):
        gated_delta_rule(*inputs, kernel="fla")
    assert not fla_calls


def test_default_kernel(monkeypatch):
    assert default_kernel(torch.device("cpu")) == "torch"
    monkeypatch.setattr("longstraw_megatron.ops.delta_rule.find_spec", lambda name: None)
    assert default_kernel(torch.device("cuda")) == "torch"
    monkeypatch.setattr("longstraw_megatron.ops.delta_rule.find_spec", lambda name: name == "fla")
    assert default_kernel(torch.device("cuda")) == "fla"
