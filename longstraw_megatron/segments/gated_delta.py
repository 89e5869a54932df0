"""The gated delta rule and its convolution for one segment: initial state in, final state out, both with gradient.

Under context parallelism the tokens of a segment lie on several ranks. Where the heads divide, tokens are exchanged
for heads (all-to-all): every rank then runs whole sequences of its heads, and its state is sharded by heads.
Otherwise `segments/delta_relay.py` keeps the tokens and relays the state over the ranks.

Letters: T rows of this rank's shard, L tokens of the segment over all ranks; others as in delta_heads.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw_megatron.comm.collectives import heads_to_seq, seq_to_heads
from longstraw_megatron.ops.conv import causal_conv
from longstraw_megatron.ops.delta_rule import gated_delta_rule
from longstraw_megatron.segments.delta_heads import DeltaShape, at_least_float32, heads_of, pack, unpack
from longstraw_megatron.segments.delta_relay import relay_delta
from longstraw_megatron.segments.delta_state import boundary_state, keep_state
from longstraw_megatron.segments.segment import Segment
from longstraw_megatron.segments.state_gradient import keep_in_graph


def _run_batch(qkv, g, beta, conv_weight, tail, state, lengths, shape, kernel) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences that all start from (tail, state), as one padded batch: padding has g = beta = 0 and comes last."""
    num = len(lengths)
    mixed, new_tail = causal_conv(pack(qkv, lengths), tail.expand(num, -1, -1), conv_weight, kernel=kernel)
    query, key, value = heads_of(F.silu(mixed), shape)
    out, final = gated_delta_rule(
        query, key, value, pack(g, lengths), pack(beta, lengths),
        initial_state=state.expand(num, -1, -1, -1), kernel=kernel,
    )  # fmt: skip
    return unpack(out, lengths), new_tail[0], final[0]


def run_sequences(
    qkv: Tensor, g: Tensor, beta: Tensor, conv_weight: Tensor, tail: Tensor, state: Tensor,
    lengths: tuple[int, ...], *, shape: DeltaShape, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """qkv [L, C], g and beta [L, H] -> (out [L, H, V], conv tail and state behind the first sequence).

    Sequences of like length run as one batch; where padding would double the work they run one by one.
    """
    if len(lengths) == 1 or len(lengths) * max(lengths) <= 2 * sum(lengths):
        return _run_batch(qkv, g, beta, conv_weight, tail, state, lengths, shape, kernel)
    pieces = zip(qkv.split(lengths), g.split(lengths), beta.split(lengths), strict=True)
    results = [_run_batch(*piece, conv_weight, tail, state, piece[0].shape[:1], shape, kernel) for piece in pieces]
    return torch.cat([out for out, _, _ in results]), results[0][1], results[0][2]


def _tokens_of(shards: Tensor, segment: Segment) -> Tensor:
    """All shards' rows [CP * T, ...] -> the tokens in packed order [L, ...]."""
    if segment.layout.is_trivial:
        return shards
    return shards.index_select(0, torch.tensor(segment.layout.gather_index(), dtype=torch.long, device=shards.device))


def _rows_of(tokens: Tensor, segment: Segment) -> Tensor:
    """Inverse of `_tokens_of`; padding rows are zero."""
    layout = segment.layout
    if layout.is_trivial:
        return tokens
    index = torch.tensor(layout.gather_index(), dtype=torch.long, device=tokens.device)
    return tokens.new_zeros(layout.cp_size * layout.rows, *tokens.shape[1:]).index_copy(0, index, tokens)


def segment_gated_delta(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    *,
    segment: Segment,
    layer_number: int,
    shape: DeltaShape,
    cp_group=None,
    kernel: str = "torch",
) -> Tensor:
    """Convolution, SiLU and gated delta rule of a segment (arXiv 2412.06464, equation 10).

    qkv [T, C] before the convolution, g (log decay) and beta [T, H], conv_weight [C, W] -> out [T, H, V]. Rows behind
    `segment.valid` are padding: they reach no state and come out as zeros. PREFILL stores the state behind the
    segment; WALK injects its gradient; REPLAY and WALK add the gradient of the state before it.
    """
    cp_size = segment.layout.cp_size
    by_heads = cp_size > 1 and shape.num_key_heads % cp_size == 0
    if cp_size > 1 and not by_heads:
        return relay_delta(
            qkv, g, beta, conv_weight,
            segment=segment, layer_number=layer_number, shape=shape, cp_group=cp_group, kernel=kernel,
        )  # fmt: skip
    if by_heads:
        counted = {"purpose": "delta_heads", "traffic": segment.traffic}
        qkv = seq_to_heads(qkv, cp_group, sections=shape.channel_splits, **counted)
        gates = torch.cat([g, beta.to(g.dtype)], dim=1)
        g, beta = seq_to_heads(gates, cp_group, sections=(g.shape[1], g.shape[1]), **counted).chunk(2, dim=1)
        own = [channels.chunk(cp_size)[segment.cp_rank] for channels in conv_weight.split(shape.channel_splits)]
        conv_weight = torch.cat(own)
        shape = shape.divided(cp_size)
    qkv, g, beta = (_tokens_of(x, segment) for x in (qkv, g, beta))
    lengths = tuple(length for length in segment.layout.lengths if length)
    if lengths:
        empty = (
            qkv.new_zeros(conv_weight.shape[1] - 1, qkv.shape[1]),
            qkv.new_zeros(shape.num_value_heads, shape.key_dim, shape.value_dim, dtype=at_least_float32(qkv[:0]).dtype),
        )
        tail, state = boundary_state(segment, layer_number, empty)
        out, new_tail, final = run_sequences(
            qkv, g, beta, conv_weight, tail, state, lengths, shape=shape, kernel=kernel
        )
        out = keep_state(out, segment, layer_number, new_tail, final)
    else:
        # A rank in lockstep without a token: nothing runs, but the graph must reach every parameter.
        out = keep_in_graph(qkv.new_zeros(0, shape.num_value_heads, shape.value_dim), qkv, g, beta, conv_weight)
    out = _rows_of(out, segment)
    return heads_to_seq(out.flatten(1), cp_group, **counted).unflatten(1, (-1, shape.value_dim)) if by_heads else out
