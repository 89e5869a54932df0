"""The chunked gated delta rule against the token-by-token one and against Megatron's: outputs and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from longstraw_megatron.functional import delta_rule
from longstraw_megatron.functional.delta_rule import (
    Tiling,
    chunk_gated_delta_rule,
    delta_rule_affine,
    delta_rule_transition,
    recurrent_gated_delta_rule,
)

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)).item()


def make_inputs(num_tokens, *, batch=2, num_heads=3, key_dim=8, value_dim=12, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, k = (F.normalize(normal(batch, num_tokens, num_heads, key_dim), dim=-1) for _ in range(2))
    v = normal(batch, num_tokens, num_heads, value_dim)
    g = -2.0 * torch.rand(batch, num_tokens, num_heads, generator=gen, dtype=torch.float64)
    beta = torch.rand(batch, num_tokens, num_heads, generator=gen, dtype=torch.float64)
    state = normal(batch, num_heads, key_dim, value_dim)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta, state)]


def run(rule, inputs, *, uses=("out", "state"), **kwargs):
    """Outputs and gradients of a loss that weighs every element of the outputs in `uses` differently."""
    out, state = rule(*inputs[:5], initial_state=inputs[5], **kwargs)
    loss = 0.0
    for name, x in (("out", out), ("state", state)):
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
        loss = loss + (x * weight.to(x.dtype)).sum() * (name in uses)
    used = [x for x in inputs if x is not None]
    grads = torch.autograd.grad(loss, used, allow_unused=True)
    return [out, state, *(torch.zeros_like(x) if g is None else g for x, g in zip(used, grads, strict=True))]


def assert_close(got, want, tolerance):
    errors = {name: relative(a, b) for name, a, b in zip(("out", "final_state", *NAMES), got, want, strict=False)}
    assert max(errors.values()) <= tolerance, errors


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 63, 64, 65, 130])
def test_float64_equals_recurrent(num_tokens, chunk_size):
    inputs = make_inputs(num_tokens)
    assert_close(
        run(chunk_gated_delta_rule, inputs, tiling=Tiling(chunk_size)), run(recurrent_gated_delta_rule, inputs), 1e-10
    )


@pytest.mark.parametrize("num_tokens", [1, 3, 63, 64, 65, 130])
def test_float32_equals_recurrent_in_float64(num_tokens):
    inputs = make_inputs(num_tokens)
    single = [x.detach().float().requires_grad_() for x in inputs]
    double = [x.detach().double().requires_grad_() for x in single]
    assert_close(run(chunk_gated_delta_rule, single), run(recurrent_gated_delta_rule, double), 1e-5)


@pytest.mark.parametrize("uses", [("out",), ("state",)])
def test_one_output_unused(uses):
    inputs = make_inputs(70)
    got, want = run(chunk_gated_delta_rule, inputs, uses=uses), run(recurrent_gated_delta_rule, inputs, uses=uses)
    assert_close(got, want, 1e-10)


def test_many_blocks():
    """Two chunks a block, the last block short: the states between blocks carry both directions."""
    inputs = make_inputs(150)
    tiling = Tiling(16, 2 * 2 * 3 * 16 * (16 + 8 + 12))
    assert len(delta_rule._blocks(inputs[1], inputs[2], tiling)) == 6
    assert_close(run(chunk_gated_delta_rule, inputs, tiling=tiling), run(recurrent_gated_delta_rule, inputs), 1e-10)


def test_equals_megatron():
    from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

    inputs = make_inputs(130, dtype=torch.float32)

    def megatron(q, k, v, g, beta, *, initial_state):
        return torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)

    assert_close(run(chunk_gated_delta_rule, inputs), run(megatron, inputs), 1e-5)


def test_no_initial_state_is_zero():
    inputs = make_inputs(65)
    zero = [*inputs[:5], torch.zeros_like(inputs[5]).requires_grad_()]
    got = run(chunk_gated_delta_rule, [*inputs[:5], None])
    assert_close(got, run(recurrent_gated_delta_rule, zero)[:-1], 1e-10)


def test_no_tokens_hands_the_state_on():
    *inputs, state = make_inputs(0)
    out, final = chunk_gated_delta_rule(*inputs, initial_state=state)
    assert out.shape == (2, 0, 3, 12) and torch.equal(final, state) and final.data_ptr() != state.data_ptr()
    weight = torch.randn_like(final)
    grads = torch.autograd.grad((final * weight).sum() + out.sum(), [*inputs, state])
    assert torch.equal(grads[-1], weight) and all(grad.shape == x.shape for grad, x in zip(grads, inputs, strict=False))
    out, final = chunk_gated_delta_rule(*inputs)
    assert final.requires_grad and final.shape == state.shape and not final.any()


@pytest.mark.parametrize("cuts", [(1,), (40,), (64,), (1, 2, 3), (63, 65, 66), (7, 7, 100)])
def test_cut_anywhere_and_carry_the_state(cuts):
    inputs = make_inputs(130)

    def in_pieces(*tensors, initial_state):
        outs, state, bounds = [], initial_state, (0, *cuts, 130)
        for start, stop in zip(bounds, bounds[1:], strict=False):
            out, state = chunk_gated_delta_rule(*(x[:, start:stop] for x in tensors), initial_state=state)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    assert_close(run(in_pieces, inputs), run(chunk_gated_delta_rule, inputs), 1e-10)


def test_padding_leaves_no_trace():
    """Tokens with g = beta = 0 behind the last one change neither the state nor any gradient, whatever they hold."""
    inputs = make_inputs(50)

    def padded(q, k, v, g, beta, *, initial_state):
        junk = [torch.full_like(x[:, :21], 1e3) for x in (q, k, v)] + [torch.zeros_like(x[:, :21]) for x in (g, beta)]
        tensors = [torch.cat(pair, dim=1) for pair in zip((q, k, v, g, beta), junk, strict=True)]
        out, state = chunk_gated_delta_rule(*tensors, initial_state=initial_state)
        return out[:, :50], state

    assert_close(run(padded, inputs), run(chunk_gated_delta_rule, inputs), 1e-10)


def test_strong_decay_does_not_overflow():
    """exp(c_i - c_j) above the diagonal is exp(+640) here."""
    inputs = make_inputs(64, dtype=torch.float32)
    inputs[3] = torch.full_like(inputs[3], -10.0).requires_grad_()
    double = [x.detach().double().requires_grad_() for x in inputs]
    got = run(chunk_gated_delta_rule, inputs)
    assert all(x.isfinite().all() for x in got)
    assert_close(got, run(recurrent_gated_delta_rule, double), 1e-5)


@pytest.mark.parametrize("strength", [0.1, 1.0, 12.0])
def test_gate_gradient_keeps_its_digits(strength):
    """sum_t g_t dg_t per head is what A_log receives: with strong gates a small rest of what the state carries."""
    inputs = make_inputs(200, dtype=torch.float32)
    inputs[3] = (inputs[3].detach() * strength).requires_grad_()
    double = [x.detach().double().requires_grad_() for x in inputs]
    got, want = (
        (tensors[3] * run(rule, tensors)[5]).double().sum(1)
        for rule, tensors in ((chunk_gated_delta_rule, inputs), (recurrent_gated_delta_rule, double))
    )
    assert relative(got, want) <= 2e-6


def test_bfloat16_inputs_are_computed_in_float32():
    inputs = make_inputs(65, dtype=torch.bfloat16)
    mixed = [*inputs[:3], inputs[3].detach().float().requires_grad_(), inputs[4], inputs[5].detach().float()]
    single = [x.detach().float().requires_grad_() for x in mixed]
    mixed[5].requires_grad_()
    got, want = run(chunk_gated_delta_rule, mixed), run(chunk_gated_delta_rule, single)
    assert [x.dtype for x in got[:2]] == [torch.bfloat16, torch.float32]
    assert [x.dtype for x in got[2:]] == [x.dtype for x in mixed]
    assert_close(got, want, 1e-2)  # bfloat16 has 8 bits: 4e-3 a rounding
    assert torch.equal(got[1], want[1])  # the state saw no rounding but the inputs' own


def test_strided_inputs_are_read_in_place():
    """Views of one projection, as the model makes them, are neither copied wrongly nor written to."""
    base = torch.randn(1, 70, 3, 8 + 8 + 12, dtype=torch.float64)
    kept = base.clone()
    q, k, v = base.split([8, 8, 12], dim=-1)
    k = F.normalize(k, dim=-1)
    _, _, _, g, beta, state = make_inputs(70, batch=1)
    with torch.no_grad():
        got = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state)
        want = recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=state)
    assert torch.equal(base, kept)
    assert relative(got[0], want[0]) <= 1e-10 and relative(got[1], want[1]) <= 1e-10


@pytest.mark.parametrize("num_tokens", [0, 1, 65, 130])
def test_affine_map(num_tokens):
    """A @ S + B is the final state for any S, and its gradients are the recurrent rule's."""
    inputs = make_inputs(num_tokens)

    def by_map(q, k, v, g, beta, *, initial_state):
        transition, offset = delta_rule_affine(k, v, g, beta, tiling=Tiling(16))
        return q.new_zeros(()), transition @ initial_state + offset

    got, want = run(by_map, inputs, uses=("state",)), run(recurrent_gated_delta_rule, inputs, uses=("state",))
    assert_close(got[1:], want[1:], 1e-10)


def test_transition_alone_and_composed():
    _, k, v, g, beta, state = make_inputs(130)
    whole = delta_rule_transition(k, g, beta)
    assert whole.shape == (2, 3, 8, 8)
    assert relative(whole, delta_rule_affine(k, v, g, beta)[0]) <= 1e-12
    first, second = (
        delta_rule_transition(k[:, part], g[:, part], beta[:, part]) for part in (slice(37), slice(37, 130))
    )
    assert relative(second @ first, whole) <= 1e-12
    weight = torch.randn_like(whole)
    zeros = torch.zeros_like(v)

    def final_state(k, g, beta):
        eye = torch.eye(8, dtype=k.dtype).expand(2, 3, 8, 8)
        return recurrent_gated_delta_rule(k, k, zeros[..., :8], g, beta, initial_state=eye)[1]

    got = torch.autograd.grad((whole * weight).sum(), (k, g, beta))
    want = torch.autograd.grad((final_state(k, g, beta) * weight).sum(), (k, g, beta))
    assert max(relative(a, b) for a, b in zip(got, want, strict=True)) <= 1e-10


def test_backward_keeps_only_inputs_and_block_states():
    """Saved for backward: no [C, C] matrix, nothing per chunk."""
    inputs = make_inputs(512, batch=1, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        chunk_gated_delta_rule(*inputs[:5], initial_state=inputs[5], tiling=Tiling(32))
    pointers = {x.data_ptr() for x in inputs}
    own = [x for x in saved if x.data_ptr() not in pointers]
    assert len(own) == 1 and own[0].shape[1:] == (3, 8, 12)
    assert own[0].shape[0] == len(delta_rule._blocks(inputs[1], inputs[2], Tiling(32))) <= 2
