"""Latents and index keys shared out over tensor-parallel ranks: a head each, against the dense float64 oracle."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from sparse_case import CASES, LAYER, NUM_HEADS, Rank, assert_equals_dense, dense_reference, make_sequences

from longstraw_megatron.layout import cut_sequences, piece_of, split_shards
from longstraw_megatron.layout.transfer import Transfer
from longstraw_megatron.testing import run_ranks

SHARED = (("ragged", torch.float32, 3), ("one_token_prompt", torch.float64, 1), ("blocks", torch.float64, 1))


@pytest.mark.parametrize("style", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cp_size, parts", [(1, 2), (2, 3), (3, 4)])
def test_pieces_are_the_shards(style, cp_size, parts):
    for lengths in ((17,), (5, 1, 9), (1,), (0,)):
        layout = cut_sequences(lengths, cp_size=cp_size, style=style, multiple=2)
        split = split_shards(layout, parts)
        assert (split.cp_size, split.num_tokens) == (cp_size * parts, layout.num_tokens)
        for cp_rank in range(cp_size):
            owners = range(cp_rank * parts, (cp_rank + 1) * parts)
            assert sum((split.packed_index(owner) for owner in owners), []) == layout.packed_index(cp_rank)
            sizes = [split.valid(owner) for owner in owners]
            pieces = [piece_of(layout.valid(cp_rank), part, parts) for part in range(parts)]
            assert sizes == [piece.stop - piece.start for piece in pieces]
            assert max(sizes) <= -(-layout.valid(cp_rank) // parts) <= split.rows
            for owner in owners:
                assert [run.offset for run in split.runs[owner]] == [
                    sum(run.length for run in split.runs[owner][:i]) for i in range(len(split.runs[owner]))
                ]
    assert split_shards(layout, 1) is layout


def _all_cases(rank, world_size, transfer, style):
    """TP runs faster than CP, as in Megatron's group of both."""
    cp_size, tp_size = world_size // NUM_HEADS, NUM_HEADS
    groups = [dist.new_group(range(i * tp_size, (i + 1) * tp_size)) for i in range(cp_size)]
    cp_rank, results, bytes_sent = rank // tp_size, {}, 0
    for case, dtype, multiple in SHARED:
        segment_lengths, lengths, *work = CASES[case]
        part = Rank(
            make_sequences(sum(segment_lengths), lengths), cp_rank=cp_rank, cp_size=cp_size,
            cp_group=dist.group.WORLD, tp_group=groups[cp_rank], style=style, multiple=multiple, dtype=dtype,
            transfer=transfer, one_page=multiple == 3,
        )  # fmt: skip
        results[case, dtype] = part.train(segment_lengths, *work)
        bytes_sent += part.traffic.total
    return results, bytes_sent


@pytest.mark.parametrize("cp_size, style, transfer", [
    *((1, "contiguous", transfer) for transfer in get_args(Transfer)),
    (2, "zigzag", "ring"), (2, "contiguous", "gather_keys"), (2, "zigzag", None),
])  # fmt: skip
def test_equals_dense(cp_size, style, transfer):
    ranks = run_ranks(cp_size * NUM_HEADS, _all_cases, transfer, style)
    assert all(bytes_sent > 0 for _, bytes_sent in ranks)
    for case, dtype, _ in SHARED:
        segment_lengths, lengths, *_ = CASES[case]
        reference = dense_reference(make_sequences(sum(segment_lengths), lengths))
        assert_equals_dense([results[case, dtype] for results, _ in ranks], reference, dtype, (case, dtype))


def _rows_held(rank, world_size):
    sequences = make_sequences(40, ())
    part = Rank(sequences, cp_group=dist.group.WORLD, tp_group=dist.group.WORLD)
    part.path(0, [16, 24], 0, state=part.state)
    return [part.state.rows(kind, LAYER).num_rows for kind in ("latent", "index_key")]


def test_a_rank_keeps_its_part():
    assert run_ranks(3, _rows_held) == [[14, 14], [14, 14], [12, 12]]
