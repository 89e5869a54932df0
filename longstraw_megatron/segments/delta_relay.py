"""The gated delta rule with tokens kept on their ranks: the state is relayed over the context-parallel group.

Over each of its runs a rank reduces the recurrence to an affine map of the state, S_out = A S_in + B. The maps are
gathered once, and every rank composes those of the runs before its own; backward mirrors this through the gather's
reduce-scatter. The convolution takes its W-1 rows from as many earlier runs as it needs.

The recurrent state at a boundary is kept in CP equal shards of its flattened form and gathered where it is read.
Letters as in gated_delta.py; R runs of this rank; a slot is a run's place in what every rank contributes to a gather.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw_megatron.comm.collectives import all_gather_rows
from longstraw_megatron.layout import Run, SegmentLayout
from longstraw_megatron.ops.conv import causal_conv
from longstraw_megatron.ops.delta_rule import delta_rule_affine, gated_delta_rule
from longstraw_megatron.segments.delta_heads import DeltaShape, at_least_float32, heads_of, pack, unpack
from longstraw_megatron.segments.delta_state import boundary_state, keep_state
from longstraw_megatron.segments.segment import Segment
from longstraw_megatron.segments.state_gradient import keep_in_graph


def slots_of(layout: SegmentLayout) -> list[list[int]]:
    """For each rank, the slot of each of its runs; equal on all ranks, so that gathered tensors line up."""
    num_sequences = len(layout.lengths)
    counts = [[sum(run.sequence == i for run in runs) for runs in layout.runs] for i in range(num_sequences)]
    starts, total = [], 0
    for per_rank in counts:
        starts.append(total)
        total += max(per_rank, default=0)
    slots = []
    for runs in layout.runs:
        used = list(starts)
        slots.append([])
        for run in runs:
            slots[-1].append(used[run.sequence])
            used[run.sequence] += 1
    return slots


def num_slots(layout: SegmentLayout) -> int:
    return max((slot + 1 for slots in slots_of(layout) for slot in slots), default=0)


def earlier_pieces(layout: SegmentLayout, run: Run | None, sequence: int) -> list[tuple[int, int, int]]:
    """(cp_rank, slot, length) of the runs of `sequence` before `run` (all of them for None), in sequence order."""
    slots = slots_of(layout)
    pieces = [
        (other.start, cp_rank, slot, other.length)
        for cp_rank, runs in enumerate(layout.runs)
        for slot, other in zip(slots[cp_rank], runs, strict=True)
        if other.sequence == sequence and (run is None or other.start < run.start)
    ]
    return [piece[1:] for piece in sorted(pieces)]


def _gather_slots(per_run: Tensor, segment: Segment, cp_group) -> Tensor:
    """per_run [R, ...] of this rank -> [CP, slots, ...] of all ranks; slots that a rank does not fill are zero."""
    total = num_slots(segment.layout)
    mine = torch.tensor(slots_of(segment.layout)[segment.cp_rank], dtype=torch.long, device=per_run.device)
    filled = per_run.new_zeros(total, *per_run.shape[1:]).index_copy(0, mine, per_run)
    return all_gather_rows(filled, cp_group, purpose="delta_relay", traffic=segment.traffic).unflatten(
        0, (segment.layout.cp_size, total)
    )


def _halo(last_rows: Tensor, tail: Tensor, layout: SegmentLayout, run: Run | None, sequence: int) -> Tensor:
    """The W-1 rows before `run` (at the end of the sequence for None).

    last_rows [CP, slots, W-1, C]: each run's last rows, right-aligned; tail [W-1, C]: those before the segment.
    """
    width = tail.shape[0]
    rows = [tail] + [
        last_rows[cp_rank, slot, width - min(width, length) :]
        for cp_rank, slot, length in earlier_pieces(layout, run, sequence)
    ]
    return torch.cat(rows)[-width:] if width else tail


def _compose(
    maps_a: Tensor, maps_b: Tensor, state: Tensor, layout: SegmentLayout, run: Run | None, sequence: int
) -> Tensor:
    """State before `run` (at the end of the sequence for None): the earlier runs' maps, applied in order."""
    for cp_rank, slot, _ in earlier_pieces(layout, run, sequence):
        state = maps_a[cp_rank, slot] @ state + maps_b[cp_rank, slot]
    return state


def _own_shard(state: Tensor, segment: Segment) -> Tensor:
    """This rank's part of a recurrent state [H, K, V], flattened and padded to CP equal parts."""
    flat = state.flatten()
    size = -(-flat.numel() // segment.layout.cp_size)
    flat = F.pad(flat, (0, size * segment.layout.cp_size - flat.numel()))
    return flat[segment.cp_rank * size : (segment.cp_rank + 1) * size]


def relay_delta(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    *,
    segment: Segment,
    layer_number: int,
    shape: DeltaShape,
    cp_group,
    kernel: str,
) -> Tensor:
    """As `segment_gated_delta`, with tokens that stay: qkv [T, C], g and beta [T, H] -> out [T, H, V]."""
    layout, runs = segment.layout, segment.runs
    width = conv_weight.shape[1] - 1
    state_dtype = at_least_float32(qkv[:0]).dtype
    empty = qkv.new_zeros(width, qkv.shape[1]), qkv.new_zeros(0, dtype=state_dtype)
    tail, shard = boundary_state(segment, layer_number, empty)
    full_shape = (shape.num_value_heads, shape.key_dim, shape.value_dim)
    if shard.numel():
        whole = all_gather_rows(shard, cp_group, purpose="delta_state", traffic=segment.traffic)
        state = whole[: full_shape[0] * full_shape[1] * full_shape[2]].view(full_shape)
    else:
        state = qkv.new_zeros(full_shape, dtype=state_dtype)

    lengths = tuple(run.length for run in runs)
    valid = sum(lengths)
    # A rank without runs still takes part in every gather, forward and backward.
    if runs:
        rows = [
            F.pad(x[-width:] if width else x[:0], (0, 0, max(width - x.shape[0], 0), 0))
            for x in qkv[:valid].split(lengths)
        ]
        last_rows = _gather_slots(torch.stack(rows), segment, cp_group)
    else:
        last_rows = _gather_slots(qkv[:0, None].expand(0, width, -1), segment, cp_group)
    new_tail = _halo(last_rows, tail, layout, None, 0)

    if runs:
        tails = torch.stack([_halo(last_rows, tail, layout, run, run.sequence) for run in runs])
        mixed, _ = causal_conv(pack(qkv[:valid], lengths), tails, conv_weight, kernel=kernel)
        query, key, value = heads_of(F.silu(mixed), shape)
        g_runs, beta_runs = pack(g[:valid], lengths), pack(beta[:valid], lengths)
        maps = torch.cat(delta_rule_affine(key, value, g_runs, beta_runs), dim=-1)
    else:
        maps = qkv.new_zeros(0, *full_shape[:2], shape.key_dim + shape.value_dim, dtype=state_dtype).requires_grad_()
    gathered = _gather_slots(maps, segment, cp_group)
    maps_a, maps_b = gathered.split((shape.key_dim, shape.value_dim), dim=-1)
    final = _compose(maps_a, maps_b, state, layout, None, 0)

    if runs:
        before = torch.stack([_compose(maps_a, maps_b, state, layout, run, run.sequence) for run in runs])
        out, _ = gated_delta_rule(query, key, value, g_runs, beta_runs, initial_state=before, kernel=kernel)
        out = F.pad(unpack(out, lengths), (0, 0, 0, 0, 0, qkv.shape[0] - valid))
    else:
        out = qkv.new_zeros(qkv.shape[0], shape.num_value_heads, shape.value_dim)
    out = keep_in_graph(out, last_rows, gathered, state, qkv, g, beta, conv_weight)
    return keep_state(out, segment, layer_number, new_tail, _own_shard(final, segment))
