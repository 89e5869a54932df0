"""Index selection and sparse attention of segments against a dense float64 oracle, in every transfer form."""

import logging
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from sparse_case import (
    CASES,
    DIM,
    INDEX_DIM,
    INDEX_HEADS,
    LATENT,
    LAYER,
    NUM_HEADS,
    SCALE,
    TOLERANCE,
    TOPK,
    Rank,
    assert_equals_dense,
    dense_reference,
    make_sequences,
)

from longstraw_megatron.layout.transfer import Transfer
from longstraw_megatron.layout.travel import TravelShape, choose_travel, travel_bytes
from longstraw_megatron.segments import travel
from longstraw_megatron.segments.index_selection import select_topk, token_maps
from longstraw_megatron.segments.segment import Mode
from longstraw_megatron.segments.sparse_attention import SparseCall, pack_index, segment_sparse_attention
from longstraw_megatron.testing import largest_tensor, run_ranks


@pytest.mark.parametrize("one_page", [True, False], ids=["page", "pages"])
@pytest.mark.parametrize("multiple, dtype", [(1, torch.float64), (4, torch.float32)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case", CASES)
def test_one_rank_equals_dense(case, multiple, dtype, one_page):
    segment_lengths, lengths, *work = CASES[case]
    sequences = make_sequences(sum(segment_lengths), lengths)
    results = Rank(sequences, multiple=multiple, dtype=dtype, one_page=one_page).train(segment_lengths, *work)
    assert_equals_dense([results], dense_reference(sequences), dtype, case)


def test_the_cases_drop_keys_and_break_ties():
    """The data would not notice a wrong selection otherwise."""
    sequence = make_sequences(33, ())[0]
    selection = dense_reference([sequence])[0][0]
    assert (selection[TOPK:] >= 0).all() and len(selection) > 3 * TOPK
    dots = torch.einsum("tnd,sd->tns", sequence[3], sequence[4]).clamp_min(0)
    scores = (dots * sequence[5][..., None]).sum(1)
    plain = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))[TOPK:].topk(TOPK).indices
    assert (plain.sort(1).values != selection[TOPK:].sort(1).values).any()


def _all_cases(cp_rank, cp_size, transfer, style):
    results = {}
    for case, (segment_lengths, lengths, *work) in CASES.items():
        sequences = make_sequences(sum(segment_lengths), lengths)
        for dtype, multiple in ((torch.float64, 1), (torch.float32, 4)):
            rank = Rank(
                sequences, cp_rank=cp_rank, cp_size=cp_size, cp_group=dist.group.WORLD, style=style,
                multiple=multiple, dtype=dtype, transfer=transfer, one_page=multiple == 4,
            )  # fmt: skip
            results[case, dtype] = rank.train(segment_lengths, *work)
    return results


LAYOUTS = [(2, "contiguous"), (3, "zigzag")]


@pytest.mark.parametrize(
    "cp_size, style, transfer",
    [*((*layout, transfer) for layout in LAYOUTS for transfer in get_args(Transfer)), (4, "zigzag", None)],
)
def test_every_transfer_equals_dense(cp_size, style, transfer):
    results = run_ranks(cp_size, _all_cases, transfer, style)
    for case, (segment_lengths, lengths, *_) in CASES.items():
        reference = dense_reference(make_sequences(sum(segment_lengths), lengths))
        for dtype in TOLERANCE:
            assert_equals_dense([rank[case, dtype] for rank in results], reference, dtype, (case, dtype))


def _replay(cp_rank, cp_size, transfer, exact, dtype=torch.float64):
    """A packed replay behind a ragged prefix that is not walked: (rank, segment, packed tensors)."""
    group = dist.group.WORLD if cp_size > 1 else None
    segment_lengths, lengths, _ = CASES["ragged"]
    sequences = make_sequences(sum(segment_lengths), lengths)
    rank = Rank(
        sequences, cp_rank=cp_rank, cp_size=cp_size, cp_group=group, exact=exact, dtype=dtype, transfer=transfer
    )
    rank.path(0, segment_lengths, 0, state=rank.state)
    held = rank.state.rows("latent", LAYER).num_rows
    segment = rank.segment(Mode.REPLAY, len(segment_lengths), sum(segment_lengths), tuple(lengths), held)
    return rank, segment, [torch.cat(parts) for parts in zip(*sequences[1:], strict=True)]


def _detached(cp_rank, cp_size, transfer):
    rank, segment, packed = _replay(cp_rank, cp_size, transfer, exact=False)
    rank.run(segment, packed, [(result, 0) for result in rank.results[1:]])
    assert rank.state.rows("latent", LAYER).grad_bytes() == 0
    return rank.results


@pytest.mark.parametrize("cp_size, transfer", [(1, None), (2, "ring"), (2, "gather_queries"), (2, "gather_keys")])
def test_detached_prompt_gets_no_gradient(cp_size, transfer):
    results = run_ranks(cp_size, _detached, transfer)
    segment_lengths, lengths, _ = CASES["ragged"]
    reference = dense_reference(make_sequences(sum(segment_lengths), lengths), detached=True)
    assert_equals_dense([rank[1:] for rank in results], reference[1:], torch.float64, transfer)


def _count_bytes(cp_rank, cp_size, transfer, exact):
    """(counted, formula) of selection, forward and backward in float32."""
    rank, segment, packed = _replay(cp_rank, cp_size, transfer, exact, torch.float32)
    q, latent, dout, *index = (rank.shard(segment, x) for x in packed)
    call = {"segment": segment, "layer_number": LAYER, "cp_group": dist.group.WORLD, "transfer": transfer}
    counted = [rank.traffic.total]
    positions = select_topk(*index, index_topk=TOPK, **call)
    counted.append(rank.traffic.total)
    kernel = {"softmax_scale": SCALE, "kv_lora_rank": LATENT}
    out = segment_sparse_attention(q.requires_grad_(), latent.requires_grad_(), positions, **kernel, **call)
    counted.append(rank.traffic.total)
    out.backward(dout)
    counted.append(rank.traffic.total)
    by_rank = token_maps(segment).prefix.rows_by_rank
    assert by_rank[cp_rank] == segment.prefix_rows and len(set(by_rank)) > 1
    rows, keys = segment.rows, segment.rows + max(by_rank)
    lse = rows * NUM_HEADS
    index_shape = TravelShape(
        cp_size=cp_size, static=4 * rows * (INDEX_HEADS * INDEX_DIM + INDEX_HEADS), running=8 * rows * TOPK,
        keys=4 * keys * INDEX_DIM,
    )  # fmt: skip
    forward = TravelShape(
        cp_size=cp_size, static=4 * (lse * DIM + rows * TOPK), running=4 * lse * (LATENT + 1), keys=4 * keys * DIM
    )
    backward = TravelShape(
        cp_size=cp_size, static=4 * (lse * (DIM + 2 * LATENT + 1) + rows * TOPK), running=4 * lse * DIM,
        keys=4 * keys * DIM, key_grads=4 * (keys if exact else rows) * DIM,
    )  # fmt: skip
    sparse_call = SparseCall(segment, LAYER, dist.group.WORLD, SCALE, LATENT)
    assert sparse_call.shape(q, positions, latent, backward=False) == forward
    assert sparse_call.shape(q, positions, latent, backward=True) == backward
    sent = [b - a for a, b in zip(counted, counted[1:], strict=False)]
    return sent, [travel_bytes(transfer, shape) for shape in (index_shape, forward, backward)]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "detached"])
@pytest.mark.parametrize("transfer", get_args(Transfer))
def test_counted_bytes_equal_the_formula(transfer, exact):
    for counted, formula in run_ranks(3, _count_bytes, transfer, exact):
        assert counted == formula
        assert min(counted) > 0


def test_choice_by_bytes():
    """GLM-5.2's layer on 8 ranks: latents move while the prefix is short, queries when it is long."""

    def forward(segment_rows, prefix_rows):
        return TravelShape(
            cp_size=8, static=segment_rows * (64 * 576 * 2 + 2048 * 4), running=segment_rows * 64 * (512 + 1) * 4,
            keys=(segment_rows + prefix_rows) * 576 * 2,
        )  # fmt: skip

    assert choose_travel(forward(2048, 2048)) == "gather_keys"
    assert choose_travel(forward(2048, 262144), buffer_limit=1 << 40) == "gather_keys"
    assert choose_travel(forward(2048, 262144)) == "ring"  # its buffers are the smallest
    assert choose_travel(forward(64, 262144), buffer_limit=1 << 40) == "gather_queries"
    assert choose_travel(forward(2, 262144)) == "gather_queries"


def _said(cp_rank, cp_size):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    travel.logger.addHandler(handler)
    travel.logger.setLevel(logging.INFO)
    segment_lengths, lengths, microbatches = CASES["one_by_one"]
    sequences = make_sequences(sum(segment_lengths), lengths)
    Rank(sequences, cp_rank=cp_rank, cp_size=cp_size, cp_group=dist.group.WORLD).train(segment_lengths, microbatches)
    return records


def test_choice_is_said_once_by_one_rank():
    said, other = run_ranks(2, _said)
    assert other == []
    assert len(said) == len({" ".join(message.split()[:6]) + message.split(": ")[1].split(",")[0] for message in said})
    assert said[0] == (
        "Index selection of a prefill segment of 4 rows on each of 2 context-parallel ranks: gather_keys, 96 bytes "
        "sent per rank in layer 4."
    )


@pytest.mark.parametrize("transfer", [None, "ring", "gather_queries", "gather_keys"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_segment_without_tokens(cp_size, transfer):
    run_ranks(cp_size, _no_tokens, transfer)


def _no_tokens(cp_rank, cp_size, transfer):
    """A rank that only keeps step with others: every row is padding, and autograd passes through."""
    group = dist.group.WORLD if cp_size > 1 else None
    sequences = make_sequences(0, (0,))
    rank = Rank(sequences, cp_rank=cp_rank, cp_size=cp_size, cp_group=group, multiple=2, transfer=transfer)
    for mode in (Mode.PREFILL, Mode.REPLAY, Mode.WALK):
        segment = rank.segment(mode, 0, 0, (0,), 0)
        assert (segment.rows, segment.valid) == (2, 0)
        rank.run(segment, sequences[0], [(rank.results[0], 0)], backward=mode is not Mode.PREFILL)


def test_group_and_layout_must_agree():
    rank = Rank(make_sequences(4, ()), cp_size=2)
    segment = rank.segment(Mode.PREFILL, 0, 0, (4,), 0)
    q, latent, _, *_ = (rank.shard(segment, x) for x in rank.sequences[0])
    with pytest.raises(ValueError, match="cut for 2 context-parallel ranks, and the group has 1"):
        segment_sparse_attention(
            q, latent, torch.zeros(2, TOPK, dtype=torch.int32), segment=segment, layer_number=LAYER,
            softmax_scale=SCALE, kv_lora_rank=LATENT,
        )  # fmt: skip
    assert rank.state.rows("latent", LAYER).num_rows == 0


def test_segment_behind_unknown_tokens_is_refused():
    rank = Rank(make_sequences(4, ()))
    segment = rank.segment(Mode.REPLAY, 1, 4, (4,), 4)
    with pytest.raises(ValueError, match="knows where 0 prefix tokens lie"):
        select_topk(*(rank.shard(segment, x) for x in rank.sequences[0][3:]), segment=segment, layer_number=LAYER,
                    index_topk=TOPK)  # fmt: skip


def test_pack_index():
    index = torch.tensor([[3, -1, 5, -1], [-1, -1, -1, 0], [-1, -1, -1, -1]], dtype=torch.int32)
    assert pack_index(index).tolist() == [[3, 5], [0, -1], [-1, -1]]
    assert pack_index(index[2:]).shape == (1, 0)
    assert pack_index(index[:0]).shape == (0, 0)
    assert pack_index(index[:, :1]).tolist() == [[3], [-1], [-1]]


def test_memory_does_not_grow_with_queries_times_keys(monkeypatch):
    """A prompt of 2,048 tokens in segments of 256: nothing near T * S * heads, in any pass."""
    prompt_length, segment_length = 2048, 256
    for name, value in {"MAX_SCORES": 1 << 13, "KEY_BLOCK": 64}.items():
        monkeypatch.setattr(f"longstraw_megatron.segments.index_selection.{name}", value)
    sequences = make_sequences(prompt_length, (64,))
    rank = Rank(sequences, dtype=torch.float32, one_page=True)
    with largest_tensor() as largest:
        rank.train([segment_length] * (prompt_length // segment_length), [[0]])
    state_bytes = 4 * prompt_length * DIM
    blocks_bytes = 8 * segment_length * NUM_HEADS * DIM
    assert largest.nbytes <= max(state_bytes, blocks_bytes), largest
    assert largest.nbytes < 4 * segment_length * prompt_length / 16, largest
