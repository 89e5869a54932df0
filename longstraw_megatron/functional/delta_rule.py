"""The gated delta rule: a recurrent state that forgets by a gate and writes what it does not yet know.

B batch, T tokens, H heads, K key head dim, V value head dim. Per head, with state S [K, V], decay exp(g_t) and

    S <- exp(g_t) S;    S <- S + k_t beta_t (v_t - k_t S);    out_t = K**-0.5 q_t S

The chunked form takes C tokens at once. In a chunk, with c = cumsum(g), D_ij = exp(c_i - c_j) for j <= i and

    M = I + strictly_lower(beta_i k_i.k_j D_ij),    [U | W] = M^-1 [beta v | beta exp(c) k],    E = exp(c_C - c) k

the written values are U - W S, so the chunk maps its state affinely, S' = P S + R, by P = exp(c_C) I - E^T W and
R = E^T U. Only these K x K maps run in sequence; everything else is batched over the chunks. Backward mirrors it:
dS = P^T dS' + Q in sequence, the rest batched, from nothing but the inputs and the state at the start of each block
of chunks. A block bounds the memory of both directions, whatever T.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable


class Tiling(NamedTuple):
    """How tokens are cut: tokens of a chunk, and elements of a block's [tokens, heads, C + K + V] at the most."""

    chunk_size: int = 64
    block_elements: int = 1 << 26


_TILING = Tiling()


class _Block(NamedTuple):
    """`chunks` chunks of `length` tokens each, from token `start`."""

    start: int
    chunks: int
    length: int


class _Maps(NamedTuple):
    """What a block's chunks do, for any state. n = chunks * B * H, chunk-major."""

    decay: Tensor  # D [n, C, C]
    grow: Tensor  # exp(c) [n, C, 1]
    shrink: Tensor  # exp(c_C - c) [n, C, 1]
    k_beta: Tensor  # [n, C, K]
    k_end: Tensor  # E [n, C, K]
    lower: Tensor  # M below its diagonal [n, C, C]; the rest is not read
    solved: Tensor  # [U | W] [n, C, V + K]
    offset: Tensor  # R [n, K, V]
    transition: Tensor  # P [n, K, K]


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token by token: the law as written above, in plain autograd. Shapes as `chunk_gated_delta_rule`."""
    dtype = _compute_dtype(k)
    batch, num_tokens, num_heads, key_dim = k.shape
    state = k.new_zeros(batch, num_heads, key_dim, v.shape[-1], dtype=dtype)
    if initial_state is not None:
        state = state + initial_state
    out = [v.new_zeros(batch, 0, num_heads, v.shape[-1], dtype=dtype)]
    for t in range(num_tokens):
        q_t, k_t, v_t, g_t, beta_t = (x[:, t].to(dtype) for x in (q, k, v, g, beta))
        state = state * g_t.exp()[..., None, None]
        written = (v_t - torch.einsum("bhk,bhkv->bhv", k_t, state)) * beta_t.unsqueeze(-1)
        state = state + torch.einsum("bhk,bhv->bhkv", k_t, written)
        out.append(torch.einsum("bhk,bhkv->bhv", q_t * key_dim**-0.5, state).unsqueeze(1))
    return torch.cat(out, dim=1).to(q.dtype), state


def _compute_dtype(k: Tensor) -> torch.dtype:
    return torch.float64 if k.dtype == torch.float64 else torch.float32


def _blocks(k: Tensor, v: Tensor, tiling: Tiling) -> list[_Block]:
    batch, num_tokens, num_heads, key_dim = k.shape
    chunk_size = tiling.chunk_size
    chunk_elements = batch * num_heads * chunk_size * (chunk_size + key_dim + v.shape[-1])
    per_block = max(1, tiling.block_elements // max(1, chunk_elements))
    num_chunks, rest = divmod(num_tokens, chunk_size)
    blocks = [
        _Block(first * chunk_size, min(per_block, num_chunks - first), chunk_size)
        for first in range(0, num_chunks, per_block)
    ]
    return blocks + [_Block(num_chunks * chunk_size, 1, rest)] if rest else blocks


def _chunked(x: Tensor, block: _Block) -> Tensor:
    """View of x [B, T, H, ...] as [chunks, B, H, C, ...]."""
    x = x[:, block.start : block.start + block.chunks * block.length].unflatten(1, (block.chunks, block.length))
    return x.permute(1, 0, 3, 2, *range(4, x.dim()))


def _load(x: Tensor, block: _Block, dtype: torch.dtype) -> Tensor:
    """x [B, T, H, ...] -> [chunks * B * H, C, ...], contiguous."""
    return _chunked(x, block).to(dtype).contiguous().flatten(0, 2)


def _store(x: Tensor, block: _Block, rows: Tensor) -> None:
    target = _chunked(x, block)
    target.copy_(rows.view(target.shape))


def _maps(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Maps:
    """From k [n, C, K], v [n, C, V], g [n, C] and beta [n, C, 1] of a block."""
    # Sums grow with C, differences of neighbours do not: float64 keeps the digits that the subtraction brings out.
    # Above the diagonal the exponential may overflow: tril_ overwrites it.
    log_decay = g.double().cumsum(-1)
    decay = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).to(k.dtype).exp_().tril_()
    shrink = (log_decay[:, -1:] - log_decay).to(k.dtype).exp_().unsqueeze(-1)
    grow = log_decay.to(k.dtype).exp_().unsqueeze(-1)
    k_beta, k_end = k * beta, k * shrink
    lower = torch.bmm(k_beta, k.mT).mul_(decay)
    # Row-major operands are column-major ones transposed: X^T M^T = B^T lets LAPACK work in place, 2 to 4 times faster.
    rhs = torch.cat([v * beta, k_beta * grow], dim=-1)
    solved = torch.linalg.solve_triangular(lower.mT, rhs.mT, upper=True, left=False, unitriangular=True).mT
    offset, transition = torch.bmm(k_end.mT, solved).split([v.shape[-1], k.shape[-1]], dim=-1)
    transition.neg_().diagonal(dim1=-2, dim2=-1).add_(grow[:, -1])
    return _Maps(decay, grow, shrink, k_beta, k_end, lower, solved, offset, transition)


def _scan(state: Tensor, transition: Tensor, offset: Tensor, *, num_chunks: int, reverse: bool = False) -> Tensor:
    """states[i + 1] = transition[i] states[i] + offset[i]; in reverse, states[i] from states[i + 1].

    state [B * H, K, V], transition [n, K, K], offset [n, K, V] -> [chunks + 1, B * H, K, V].
    """
    states = state.new_empty(num_chunks + 1, *state.shape)
    transition, offset = (x.unflatten(0, (num_chunks, -1)) for x in (transition, offset))
    states[num_chunks if reverse else 0] = state
    for i in reversed(range(num_chunks)) if reverse else range(num_chunks):
        source, target = (i + 1, i) if reverse else (i, i + 1)
        torch.baddbmm(offset[i], transition[i], states[source], out=states[target])
    return states


def _forward(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, tiling: Tiling
) -> tuple[Tensor | None, Tensor, list[Tensor]]:
    """(out [B, T, H, V] or None without q, final state [B * H, K, V], the state at the start of each block)."""
    out = None if q is None else torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    starts = []
    for block in _blocks(k, v, tiling):
        starts.append(state)
        k_n, v_n, g_n, beta_n = (_load(x, block, state.dtype) for x in (k, v, g, beta.unsqueeze(-1)))
        maps = _maps(k_n, v_n, g_n, beta_n)
        states = _scan(state, maps.transition, maps.offset, num_chunks=block.chunks)
        state = states[-1].clone()  # not a view: it outlives the block
        if q is not None:
            states = states[:-1].flatten(0, 1)
            q_n = _load(q, block, state.dtype) * k.shape[-1] ** -0.5
            u, w = maps.solved.split([v.shape[-1], k.shape[-1]], dim=-1)
            written = torch.baddbmm(u, w, states, alpha=-1)
            scores = torch.bmm(q_n, k_n.mT).mul_(maps.decay)
            _store(out, block, torch.bmm(q_n * maps.grow, states).baddbmm_(scores, written))
    return out, state, starts


def _gate_grad(pairs: Tensor, start: Tensor, end: Tensor, chunk: Tensor) -> Tensor:
    """dg [n, C]: g_p decays whatever passes from before token p to token p or later.

    Contributions (value times its gradient): pairs [n, C, C], what token i reads of token j; start [n, C], what token
    i reads of the chunk's initial state; end [n, C], what of token i reaches the chunk's final state; chunk [n], what
    of the initial state reaches it. Summing only what g_p decays, instead of differences of totals, keeps the
    gradient of strong gates, which is a small rest (A_log and dt_bias are made of it).
    """
    length = pairs.shape[-1]
    before = pairs.new_ones(length, length).triu_(1)  # [j, p]: j < p
    dg = torch.mm(pairs.flatten(0, 1), before).view_as(pairs).tril_().sum(1)  # i >= p
    dg.add_(start.flip(-1).cumsum(-1).flip(-1)).add_(chunk.unsqueeze(-1))
    dg[:, 1:] += end.cumsum(-1)[:, :-1]
    return dg


def _backward(
    dout: Tensor | None,
    dstate: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    tiling: Tiling,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq or None, dk, dv, dg, dbeta, gradient of the initial state [B * H, K, V]).

    dout [B, T, H, V] or None; dstate [B * H, K, V], of the final state; starts [blocks, B * H, K, V].
    """
    dtype, scale, value_dim = dstate.dtype, k.shape[-1] ** -0.5, v.shape[-1]
    dk, dv, dg, dbeta = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v, g, beta))
    dq = None if dout is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    for index, block in reversed(list(enumerate(_blocks(k, v, tiling)))):
        k_n, v_n, g_n, beta_n = (_load(x, block, dtype) for x in (k, v, g, beta.unsqueeze(-1)))
        maps = _maps(k_n, v_n, g_n, beta_n)
        u, w = maps.solved.split([value_dim, k.shape[-1]], dim=-1)
        states = _scan(starts[index], maps.transition, maps.offset, num_chunks=block.chunks)[:-1].flatten(0, 1)

        # In sequence: the gradient of the state at the end of each chunk.
        written = torch.baddbmm(u, w, states, alpha=-1)
        if dout is None:
            dwritten, doffset = torch.zeros_like(written), torch.zeros_like(maps.offset)
        else:
            dout_n, q_n = _load(dout, block, dtype), _load(q, block, dtype) * scale
            scores = torch.bmm(q_n, k_n.mT).mul_(maps.decay)
            dwritten = torch.bmm(scores.mT, dout_n)
            doffset = torch.bmm((q_n * maps.grow).mT, dout_n).baddbmm_(w.mT, dwritten, alpha=-1)
        dstates = _scan(dstate, maps.transition.mT, doffset, num_chunks=block.chunks, reverse=True)
        dstate, dends = dstates[0].clone(), dstates[1:].flatten(0, 1)
        dwritten.baddbmm_(maps.k_end, dends)

        # Through the solve: M^T [dvb | dkb] = d[U | W] and dM = -[dvb | dkb] [U | W]^T.
        dsolved = torch.cat([dwritten, torch.bmm(dwritten, states.mT).neg_()], dim=-1)
        drhs = torch.linalg.solve_triangular(maps.lower, dsolved.mT, upper=False, left=False, unitriangular=True).mT
        dv_beta, dk_grow = drhs.split([value_dim, k.shape[-1]], dim=-1)
        minus_dlower = torch.bmm(drhs, maps.solved.mT)
        through_pairs = (minus_dlower * maps.lower).neg_()
        minus_dlower.mul_(maps.decay).tril_(-1)
        dk_grow = dk_grow * maps.grow
        through_start = k_n * dk_grow * beta_n
        dk_beta = dk_grow.baddbmm_(minus_dlower, k_n, alpha=-1)

        dk_end = torch.bmm(written, dends.mT).mul_(maps.shrink)
        through_end = (k_n * dk_end).sum(-1)
        through_chunk = (states * dends).sum((1, 2)) * maps.grow[:, -1, 0]
        _store(dbeta, block, (k_n * dk_beta).sum(-1).add_((v_n * dv_beta).sum(-1)))
        _store(dv, block, dv_beta * beta_n)
        dk_n = dk_end.addcmul_(dk_beta, beta_n).baddbmm_(minus_dlower.mT, maps.k_beta, alpha=-1)
        if dout is not None:
            dscores = torch.bmm(dout_n, written.mT)
            through_pairs.addcmul_(dscores, scores)
            dscores.mul_(maps.decay)
            dq_n = torch.bmm(dout_n, states.mT).mul_(maps.grow)
            through_start.addcmul_(q_n, dq_n)
            _store(dq, block, dq_n.baddbmm_(dscores, k_n).mul_(scale))
            dk_n.baddbmm_(dscores.mT, q_n)
        _store(dk, block, dk_n)
        _store(dg, block, _gate_grad(through_pairs, through_start.sum(-1), through_end, through_chunk))
    return dq, dk, dv, dg, dbeta, dstate


class _ChunkRule(Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, tiling):
        ctx.set_materialize_grads(False)
        batch, _, num_heads, key_dim = k.shape
        shape = (batch * num_heads, key_dim, v.shape[-1])
        if initial_state is None:
            state = k.new_zeros(shape, dtype=_compute_dtype(k))
        else:
            state = initial_state.to(_compute_dtype(k)).reshape(shape)
        out, final_state, starts = _forward(q, k, v, g, beta, state, tiling)
        if any(ctx.needs_input_grad):
            ctx.tiling = tiling
            ctx.state_dtype = None if initial_state is None else initial_state.dtype
            ctx.save_for_backward(q, k, v, g, beta, torch.stack(starts) if starts else state.new_empty(0, *shape))
        # Without a token the final state IS the initial one: an output must not be an input.
        final_state = final_state if starts else final_state.clone()
        return out, final_state.unflatten(0, (batch, num_heads))

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal_state):
        q, k, v, g, beta, starts = ctx.saved_tensors
        if dfinal_state is None:
            dstate = starts.new_zeros(starts.shape[1:])
        else:
            dstate = dfinal_state.to(starts.dtype).flatten(0, 1)
        dq, dk, dv, dg, dbeta, dstate = _backward(dout, dstate, q, k, v, g, beta, starts, ctx.tiling)
        dinitial_state = None
        if ctx.state_dtype is not None:
            dinitial_state = dstate.unflatten(0, (k.shape[0], k.shape[2])).to(ctx.state_dtype)
        return dq, dk, dv, dg, dbeta, dinitial_state, None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    tiling: Tiling = _TILING,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over T tokens, in chunks.

    q, k: [B, T, H, K]; v: [B, T, H, V]; g (log decay, <= 0) and beta: [B, T, H]; initial_state: [B, H, K, V] or None
    for zero. T may be anything, 0 included. Any floating dtype; computed in float32 (float64 for float64). Queries
    are scaled by K**-0.5; q and k are taken as given (normalise them before). A padded token has g = beta = 0.
    Returns out [B, T, H, V] in q's dtype and final_state [B, H, K, V] in float32 (float64), both differentiable in
    all inputs. Kept for backward: the inputs, and one state per block of chunks.
    """
    return _ChunkRule.apply(q, k, v, g, beta, initial_state, tiling)


def delta_rule_affine(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, tiling: Tiling = _TILING
) -> tuple[Tensor, Tensor]:
    """What T tokens do to a state: final_state = A @ initial_state + B, in one pass without queries.

    Shapes as `chunk_gated_delta_rule`. Returns A [B, H, K, K] and B [B, H, K, V] in float32 (float64 for float64).
    """
    batch, num_tokens, num_heads, key_dim = k.shape
    # Columns of the state do not mix: those of B start from 0 and see v, those of A start from 1 and see no value.
    v = torch.cat([v, v.new_zeros(batch, num_tokens, num_heads, key_dim)], dim=-1)
    identity = torch.eye(key_dim, dtype=_compute_dtype(k), device=k.device)
    start = torch.cat([identity.new_zeros(key_dim, v.shape[-1] - key_dim), identity], dim=-1)
    start = start.expand(batch, num_heads, -1, -1)
    _, final_state = _ChunkRule.apply(None, k, v, g, beta, start, tiling)
    offset, transition = final_state.split([v.shape[-1] - key_dim, key_dim], dim=-1)
    return transition, offset


def delta_rule_transition(k: Tensor, g: Tensor, beta: Tensor, *, tiling: Tiling = _TILING) -> Tensor:
    """A [B, H, K, K] of `delta_rule_affine`: it does not depend on the values."""
    return delta_rule_affine(k, k.new_empty(*k.shape[:-1], 0), g, beta, tiling=tiling)[0]
