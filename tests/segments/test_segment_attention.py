"""Segment attention against dense float64 autograd over the whole sequence, in every transfer form."""

import logging
import math
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from longstraw_megatron.comm import Traffic
from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.layout.transfer import Transfer, TransferShape, transfer_bytes
from longstraw_megatron.segments import attention_transfer
from longstraw_megatron.segments.attention import segment_attention
from longstraw_megatron.segments.attention_transfer import prefix_rows_by_rank
from longstraw_megatron.segments.segment import Mode, Segment, positions_of
from longstraw_megatron.state import PrefixState, StateOptions
from longstraw_megatron.testing import run_ranks

NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM, LAYER = 4, 2, 8, 3
SCALE = 1 / math.sqrt(HEAD_DIM)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6}
TOLERANCE_BF16 = 1.5e-2  # inputs, partial outputs and gradients of each block are rounded to 8 bits


def relative_error(got, want):
    """Relative L2 error; a true zero (a lone token's dq) is measured against inputs of norm 1."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1.0)).item()


def random_rows(num_rows, heads, seed):
    return torch.randn(num_rows, heads, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_sequences(prompt_length, lengths):
    """[(q, k, v, dout)] of the prompt and of each branch, float64."""
    heads = (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS, NUM_HEADS)
    return [
        tuple(random_rows(n, h, 10 * i + j) for j, h in enumerate(heads))
        for i, n in enumerate((prompt_length, *lengths))
    ]


def dense_attention(q, k, v, num_prefix):
    """Masked softmax attention written out: query i sees keys [0, num_prefix + i]."""
    k, v = (x.repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    hidden = torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None] + num_prefix
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def dense_reference(sequences, detached=False):
    """For the prompt and each branch: out, dq, dk, dv of sum(out * dout) over all of them."""
    leaves = [[x.clone().requires_grad_() for x in sequence[:3]] for sequence in sequences]
    prompt_k, prompt_v = (x.detach() if detached else x for x in leaves[0][1:])
    outs = [dense_attention(*leaves[0], 0)]
    for q, k, v in leaves[1:]:
        outs.append(dense_attention(q, torch.cat([prompt_k, k]), torch.cat([prompt_v, v]), prompt_k.shape[0]))
    sum((out * sequence[3]).sum() for out, sequence in zip(outs, sequences, strict=True)).backward()
    return [(out.detach(), *(x.grad for x in sequence)) for out, sequence in zip(outs, leaves, strict=True)]


class Rank:
    """One context-parallel rank: prefill, replay and walk of the same sequences, results at their global rows."""

    def __init__(
        self,
        sequences,
        *,
        cp_rank=0,
        cp_size=1,
        cp_group=None,
        style="contiguous",
        multiple=1,
        exact=True,
        page_length=7,
        dtype=torch.float64,
        transfer=None,
    ):
        self.sequences, self.cp_rank, self.cp_size, self.cp_group = sequences, cp_rank, cp_size, cp_group
        self.style, self.multiple, self.dtype, self.transfer = style, multiple, dtype, transfer
        self.traffic = Traffic()
        self.state = PrefixState(StateOptions(exact=exact, page_length=page_length))
        self.results = [[torch.full_like(sequence[i], float("nan")) for i in (3, 0, 1, 2)] for sequence in sequences]

    def segment(self, mode, index, start, lengths, prefix_rows, state=None):
        layout = cut_sequences(lengths, cp_size=self.cp_size, multiple=self.multiple, style=self.style)
        return Segment(
            mode=mode,
            index=index,
            start=start,
            prefix_rows=prefix_rows,
            layout=layout,
            cp_rank=self.cp_rank,
            state=state or self.state,
            positions=positions_of(layout, self.cp_rank, start),
            traffic=self.traffic,
        )

    def shard(self, segment, whole):
        """This rank's rows of the packed tensor, NaN in its padding."""
        rows = whole.new_full((segment.rows, *whole.shape[1:]), float("nan"), dtype=self.dtype)
        rows[: segment.valid] = whole[segment.layout.packed_index(self.cp_rank)].to(self.dtype)
        return rows

    def run(self, segment, packed, targets, backward=True):
        """One pass; `targets` are (result tensor, first row) of each sequence of the segment."""
        q, k, v, dout = (self.shard(segment, x) for x in packed)
        leaves = [x.requires_grad_(backward) for x in (q, k, v)]
        call = {
            "segment": segment,
            "layer_number": LAYER,
            "cp_group": self.cp_group,
            "softmax_scale": SCALE,
            "transfer": self.transfer,
        }
        if not backward:
            with torch.no_grad():
                return segment_attention(*leaves, **call)
        with torch.no_grad():
            first = segment_attention(*leaves, **call)  # a checkpoint's first forward: must leave nothing behind
        out = segment_attention(*leaves, **call)
        assert torch.equal(first, out)
        out.backward(dout)
        valid = segment.valid
        for rows in (out.detach(), *(x.grad for x in leaves)):
            assert torch.equal(rows[valid:], torch.zeros_like(rows[valid:]))
        for run in segment.runs:
            result, first_row = targets[run.sequence]
            rows = slice(first_row + run.start, first_row + run.stop)
            for target, value in zip(result, (out.detach(), *(x.grad for x in leaves)), strict=True):
                target[rows] = value[run.rows].double()
        return out

    def path(self, sequence, lengths, start, *, state):
        """Prefill a sequence segment by segment; returns what walks it back."""
        rows, done, prefilled = state.rows("kv", LAYER), 0, []
        tensors = self.sequences[sequence]
        for index, length in enumerate(lengths):
            held, piece = rows.num_rows, slice(done, done + length)
            segment = self.segment(Mode.PREFILL, index, start + done, (length,), held, state)
            out = self.run(segment, [x[piece] for x in tensors], None, backward=False)
            assert rows.num_rows == held + segment.valid
            prefilled.append((index, piece, held, out))
            done += length
        assert done == tensors[0].shape[0]

        def walk():
            for index, piece, held, prefill_out in reversed(prefilled):
                length = piece.stop - piece.start
                segment = self.segment(Mode.WALK, index, start + piece.start, (length,), held, state)
                out = self.run(segment, [x[piece] for x in tensors], [(self.results[sequence], piece.start)])
                assert torch.equal(out, prefill_out)
                state.truncate(num_rows=held, boundary=index)

        return walk

    def train(self, segment_lengths, microbatches, blocks=None):
        """Prefill in segments, replay branches packed as `microbatches` (lists of branch indices), walk back.

        `blocks` {branch: lengths} are walked as paths of their own, on a fork of the prompt's state.
        """
        walk_prompt = self.path(0, segment_lengths, 0, state=self.state)
        total = self.sequences[0][0].shape[0]
        rows = self.state.rows("kv", LAYER)
        held = rows.num_rows
        for microbatch in microbatches:
            branches = [self.sequences[1 + branch] for branch in microbatch]
            lengths = tuple(branch[0].shape[0] for branch in branches)
            segment = self.segment(Mode.REPLAY, len(segment_lengths), total, lengths, held)
            packed = [torch.cat(parts) for parts in zip(*branches, strict=True)]
            self.run(segment, packed, [(self.results[1 + branch], 0) for branch in microbatch])
        for branch, lengths in (blocks or {}).items():
            self.path(1 + branch, lengths, total, state=self.state.fork())()
        assert rows.num_rows == held
        walk_prompt()
        assert rows.num_rows == 0
        return self.results


def assert_equals_dense(results, reference, dtype, what):
    """Each tensor of each sequence; `results` may come from several ranks, each with NaN where it owns nothing."""
    for sequence, wanted in enumerate(reference):
        for name, *parts, want in zip(
            ("out", "dq", "dk", "dv"), *(rank[sequence] for rank in results), wanted, strict=True
        ):
            owners = sum((~part.isnan()).int() for part in parts)
            assert torch.equal(owners, torch.ones_like(owners)), (what, sequence, name)
            error = relative_error(sum(part.nan_to_num() for part in parts), want)
            assert error <= TOLERANCE.get(dtype, TOLERANCE_BF16), (what, sequence, name, error)


CASES = {  # segment lengths of the prompt, branch lengths, microbatches
    "ragged": ([5, 1, 9, 16, 2], [6, 1, 11], [[0, 1, 2]]),
    "one_by_one": ([8, 8, 8], [6, 1, 11], [[0], [1], [2]]),
    "no_prefix": ([], [6, 1], [[0, 1]]),
    "one_token_prompt": ([1], [1], [[0]]),
    "one_segment": ([13], [3, 4], [[1], [0]]),
}


BLOCKS = {"blocks": ([4, 7], [9, 5], [[1]], {0: [2, 1, 6]})}  # besides, branches that are walked in blocks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("case", [*CASES, *BLOCKS])
def test_one_rank_equals_dense(case, multiple, dtype):
    segment_lengths, lengths, *work = (CASES | BLOCKS)[case]
    sequences = make_sequences(sum(segment_lengths), lengths)
    results = Rank(sequences, multiple=multiple, dtype=dtype).train(segment_lengths, *work)
    assert_equals_dense([results], dense_reference(sequences), dtype, case)


def _all_cases(cp_rank, cp_size, transfer, style):
    results = {}
    for case, (segment_lengths, lengths, *work) in (CASES | BLOCKS).items():
        sequences = make_sequences(sum(segment_lengths), lengths)
        for dtype, multiple in ((torch.float64, 1), (torch.float32, 4)):
            rank = Rank(
                sequences,
                cp_rank=cp_rank,
                cp_size=cp_size,
                cp_group=dist.group.WORLD,
                style=style,
                multiple=multiple,
                dtype=dtype,
                transfer=transfer,
            )
            results[case, dtype] = rank.train(segment_lengths, *work)
    return results


@pytest.mark.parametrize("cp_size, style", [(2, "contiguous"), (3, "contiguous"), (3, "zigzag"), (4, "zigzag")])
@pytest.mark.parametrize("transfer", [None, *get_args(Transfer)])
def test_every_transfer_equals_dense(cp_size, transfer, style):
    results = run_ranks(cp_size, _all_cases, transfer, style)
    for case, (segment_lengths, lengths, *_) in (CASES | BLOCKS).items():
        reference = dense_reference(make_sequences(sum(segment_lengths), lengths))
        for dtype in TOLERANCE:
            assert_equals_dense([rank[case, dtype] for rank in results], reference, dtype, (case, dtype))


def _bfloat16(cp_rank, cp_size, transfer):
    group = dist.group.WORLD if cp_size > 1 else None
    segment_lengths, lengths, microbatches = CASES["ragged"]
    sequences = make_sequences(sum(segment_lengths), lengths)
    options = {"cp_rank": cp_rank, "cp_size": cp_size, "cp_group": group, "style": "zigzag", "transfer": transfer}
    rank = Rank(sequences, dtype=torch.bfloat16, multiple=2, **options)
    return rank.train(segment_lengths, microbatches)


@pytest.mark.parametrize("cp_size, transfer", [(1, None), (2, "ring"), (2, "gather_queries"), (2, "gather_keys")])
def test_bfloat16(cp_size, transfer):
    results = run_ranks(cp_size, _bfloat16, transfer)
    segment_lengths, lengths, _ = CASES["ragged"]
    reference = dense_reference(make_sequences(sum(segment_lengths), lengths))
    assert_equals_dense(results, reference, torch.bfloat16, transfer)


def _detached(cp_rank, cp_size, transfer):
    group = dist.group.WORLD if cp_size > 1 else None
    segment_lengths, lengths, microbatches = CASES["ragged"]
    sequences = make_sequences(sum(segment_lengths), lengths)
    rank = Rank(sequences, cp_rank=cp_rank, cp_size=cp_size, cp_group=group, exact=False, transfer=transfer)
    rank.path(0, segment_lengths, 0, state=rank.state)
    held = rank.state.rows("kv", LAYER).num_rows
    segment = rank.segment(Mode.REPLAY, len(segment_lengths), sum(segment_lengths), tuple(lengths), held)
    packed = [torch.cat(parts) for parts in zip(*sequences[1:], strict=True)]
    rank.run(segment, packed, [(result, 0) for result in rank.results[1:]])
    assert rank.state.rows("kv", LAYER).grad_bytes() == 0
    return rank.results


@pytest.mark.parametrize("cp_size, transfer", [(1, None), (2, "ring"), (2, "gather_queries"), (2, "gather_keys")])
def test_detached_prompt_gets_no_gradient(cp_size, transfer):
    results = run_ranks(cp_size, _detached, transfer)
    segment_lengths, lengths, _ = CASES["ragged"]
    reference = dense_reference(make_sequences(sum(segment_lengths), lengths), detached=True)
    assert_equals_dense([rank[1:] for rank in results], reference[1:], torch.float64, transfer)


def _count_bytes(cp_rank, cp_size, transfer, exact):
    """(counted, formula) of forward and backward of one packed replay in float32 behind a ragged prefix."""
    prompt_lengths, lengths = [10, 3, 1], (5, 9)
    sequences = make_sequences(sum(prompt_lengths), lengths)
    rank = Rank(
        sequences,
        cp_rank=cp_rank,
        cp_size=cp_size,
        cp_group=dist.group.WORLD,
        exact=exact,
        dtype=torch.float32,
        transfer=transfer,
    )
    rank.path(0, prompt_lengths, 0, state=rank.state)
    held = rank.state.rows("kv", LAYER).num_rows
    segment = rank.segment(Mode.REPLAY, 3, sum(prompt_lengths), lengths, held)
    by_rank = prefix_rows_by_rank(segment, dist.group.WORLD, torch.device("cpu"))
    assert by_rank[cp_rank] == held and sum(by_rank) == sum(prompt_lengths) and len(set(by_rank)) > 1
    shape = TransferShape(
        cp_size=cp_size,
        rows=segment.rows,
        prefix_rows=max(by_rank),
        num_heads=NUM_HEADS,
        num_key_heads=NUM_KEY_HEADS,
        head_dim=HEAD_DIM,
        itemsize=4,
        sum_itemsize=4,
        prefix_grad=exact,
    )
    q, k, v, dout = (rank.shard(segment, torch.cat(parts)) for parts in zip(*sequences[1:], strict=True))
    counted = [rank.traffic.total]
    call = {"segment": segment, "layer_number": LAYER, "cp_group": dist.group.WORLD, "softmax_scale": SCALE}
    out = segment_attention(*(x.requires_grad_() for x in (q, k, v)), transfer=transfer, **call)
    counted.append(rank.traffic.total)
    out.backward(dout)
    counted.append(rank.traffic.total)
    sent = [counted[1] - counted[0], counted[2] - counted[1]]
    return sent, [transfer_bytes(transfer, shape, backward=backward) for backward in (False, True)]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "detached"])
@pytest.mark.parametrize("transfer", get_args(Transfer))
def test_counted_bytes_equal_the_formula(transfer, exact):
    for counted, formula in run_ranks(3, _count_bytes, transfer, exact):
        assert counted == formula
        assert min(counted) > 0


def _choices(cp_rank, cp_size):
    """What the log says of a long prompt's prefill and a short branch's replay, with buffers for few queries only."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    attention_transfer.logger.addHandler(handler)
    attention_transfer.logger.setLevel(logging.INFO)
    sequences = make_sequences(60, (4, 4))
    rank = Rank(sequences, cp_rank=cp_rank, cp_size=cp_size, cp_group=dist.group.WORLD)
    rank.train([12] * 5, [[0], [1]])
    return records


def test_choice_is_said_once_by_one_rank():
    said, *others = run_ranks(3, _choices)
    assert others == [[], []]
    assert [" ".join(message.split()[:6]) for message in said] == [
        "Attention forward of a prefill segment",  # gathering keys while they are few ...
        "Attention forward of a prefill segment",  # ... and queries from then on
        "Attention forward of a replay segment",
        "Attention backward of a replay segment",
        "Attention forward of a walk segment",
        "Attention backward of a walk segment",
        "Attention forward of a walk segment",
        "Attention backward of a walk segment",
    ]
    assert "gather_keys" in said[0] and "gather_queries" in said[1]
    assert said[0] == (
        "Attention forward of a prefill segment of 4 rows on each of 3 context-parallel ranks, 0 prefix rows: "
        "gather_keys, 2048 bytes sent per rank and layer."
    )


def test_group_and_layout_must_agree():
    sequences = make_sequences(4, ())
    rank = Rank(sequences, cp_size=2)
    segment = rank.segment(Mode.PREFILL, 0, 0, (4,), 0)
    q, k, v, _ = (rank.shard(segment, x) for x in sequences[0])
    with pytest.raises(ValueError, match="cut for 2 context-parallel ranks, and the group has 1"):
        segment_attention(q, k, v, segment=segment, layer_number=LAYER, softmax_scale=SCALE)
    assert rank.state.rows("kv", LAYER).num_rows == 0


@pytest.mark.parametrize("cp_size", [1, 2])
def test_segment_without_tokens(cp_size):
    run_ranks(cp_size, _no_tokens)


def _no_tokens(cp_rank, cp_size):
    """A rank that only keeps step with others: every row is padding, and autograd passes through."""
    group = dist.group.WORLD if cp_size > 1 else None
    sequences = make_sequences(0, (0,))
    rank = Rank(sequences, cp_rank=cp_rank, cp_size=cp_size, cp_group=group, multiple=2)
    for mode in (Mode.PREFILL, Mode.REPLAY, Mode.WALK):
        segment = rank.segment(mode, 0, 0, (0,), 0)
        assert (segment.rows, segment.valid) == (2, 0)
        rank.run(segment, sequences[0], [(rank.results[0], 0)], backward=mode is not Mode.PREFILL)
