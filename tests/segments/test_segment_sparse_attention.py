"""Index selection and sparse attention of segments against a dense float64 oracle, in every transfer form.

Index queries and keys are small integers, so that scores are exact however they are summed and most of them tie.
"""

import logging
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from longstraw_megatron.comm import Traffic
from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.layout.transfer import Transfer
from longstraw_megatron.layout.travel import TravelShape, choose_travel, travel_bytes
from longstraw_megatron.segments import travel
from longstraw_megatron.segments.index_selection import select_topk, token_maps
from longstraw_megatron.segments.segment import Mode, Segment, positions_of
from longstraw_megatron.segments.sparse_attention import SparseCall, pack_index, segment_sparse_attention
from longstraw_megatron.state import PrefixState, StateOptions
from longstraw_megatron.testing import largest_tensor, run_ranks

NUM_HEADS, LATENT, ROPE, INDEX_HEADS, INDEX_DIM, LAYER, TOPK = 3, 6, 2, 2, 3, 4, 5
DIM = LATENT + ROPE
SCALE = DIM**-0.5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6}
NAMES = ("positions", "out", "dq", "dlatent")


def make_sequences(prompt_length, lengths):
    """[(q, latent, dout, index_q, index_key, index_weights)] of the prompt and of each branch, float64."""
    sequences = []
    for i, n in enumerate((prompt_length, *lengths)):
        generator = torch.Generator().manual_seed(i)
        q, latent, dout = (
            torch.randn(n, *shape, dtype=torch.float64, generator=generator)
            for shape in ((NUM_HEADS, DIM), (DIM,), (NUM_HEADS, LATENT))
        )
        index_q, index_key, index_weights = (
            torch.randint(-2, 3, (n, *shape), generator=generator).double()
            for shape in ((INDEX_HEADS, INDEX_DIM), (INDEX_DIM,), (INDEX_HEADS,))
        )
        sequences.append((q, latent, dout, index_q, index_key, index_weights))
    return sequences


def literal_selection(index_q, index_weights, index_key, num_prefix):
    """Positions by the definition: sort by (-score, position), among the keys up to the query's own."""
    dots = torch.einsum("tnd,sd->tns", index_q, index_key).clamp_min(0)
    scores = (dots * index_weights[..., None]).sum(1).tolist()
    rows = []
    for t, row in enumerate(scores):
        best = sorted(range(num_prefix + t + 1), key=lambda s: (-row[s], s))[:TOPK]
        rows.append(best + [-1] * (TOPK - len(best)))
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, TOPK)


def dense_attention(q, rows, selection):
    chosen = torch.zeros(q.shape[0], rows.shape[0] + 1, dtype=torch.bool)
    chosen = chosen.scatter(1, selection.long() % (rows.shape[0] + 1), True)[:, :-1]
    scores = torch.einsum("tnd,sd->tns", q, rows) * SCALE
    return torch.einsum(
        "tns,sc->tnc", scores.masked_fill(~chosen[:, None], float("-inf")).softmax(-1), rows[:, :LATENT]
    )


def dense_reference(sequences, detached=False):
    """For the prompt and each branch: positions, out, dq, dlatent of sum(out * dout) over all of them."""
    leaves = [[x.clone().requires_grad_() for x in sequence[:2]] for sequence in sequences]
    prompt_latent = leaves[0][1].detach() if detached else leaves[0][1]
    prompt_key, num_prompt = sequences[0][4], len(sequences[0][0])
    selections, outs = [], []
    for i, (leaf, (_, _, _, index_q, index_key, index_weights)) in enumerate(zip(leaves, sequences, strict=True)):
        prefix = num_prompt if i else 0
        keys, rows = (
            (index_key, leaf[1])
            if i == 0
            else (torch.cat([prompt_key, index_key]), torch.cat([prompt_latent, leaf[1]]))
        )
        selections.append(literal_selection(index_q, index_weights, keys, prefix))
        outs.append(dense_attention(leaf[0], rows, selections[-1]))
    sum((out * sequence[2]).sum() for out, sequence in zip(outs, sequences, strict=True)).backward()
    return [
        (selection, out.detach(), *(x.grad for x in leaf))
        for selection, out, leaf in zip(selections, outs, leaves, strict=True)
    ]


class Rank:
    """One context-parallel rank: prefill, replay and walk of the same sequences, results at their global rows."""

    def __init__(
        self, sequences, *, cp_rank=0, cp_size=1, cp_group=None, style="contiguous", multiple=1, exact=True,
        page_length=7, one_page=False, dtype=torch.float64, transfer=None,
    ):  # fmt: skip
        self.sequences, self.cp_rank, self.cp_size, self.cp_group = sequences, cp_rank, cp_size, cp_group
        self.style, self.multiple, self.dtype, self.transfer = style, multiple, dtype, transfer
        num_rows = len(sequences[0][0]) if one_page else None
        self.state = PrefixState(StateOptions(exact=exact, page_length=page_length), num_rows=num_rows)
        self.traffic = Traffic()
        self.results = [
            tuple(torch.full((len(x[0]), *shape), float("nan"), dtype=torch.float64) for shape in
                  ((TOPK,), (NUM_HEADS, LATENT), (NUM_HEADS, DIM), (DIM,)))
            for x in sequences
        ]  # fmt: skip

    def segment(self, mode, index, start, lengths, prefix_rows, state=None):
        layout = cut_sequences(lengths, cp_size=self.cp_size, multiple=self.multiple, style=self.style)
        return Segment(
            mode=mode, index=index, start=start, prefix_rows=prefix_rows, layout=layout, cp_rank=self.cp_rank,
            state=state or self.state, positions=positions_of(layout, self.cp_rank, start), traffic=self.traffic,
        )  # fmt: skip

    def shard(self, segment, whole):
        """This rank's rows of the packed tensor, NaN in its padding."""
        rows = whole.new_full((segment.rows, *whole.shape[1:]), float("nan"), dtype=self.dtype)
        rows[: segment.valid] = whole[segment.layout.packed_index(self.cp_rank)].to(self.dtype)
        return rows

    def layer(self, segment, q, latent, index):
        """What one layer does: select, unless the pass already knows, and attend."""
        call = {"segment": segment, "layer_number": LAYER, "cp_group": self.cp_group, "transfer": self.transfer}
        if LAYER not in segment.topk:
            segment.topk[LAYER] = select_topk(*index, index_topk=TOPK, **call)
        kernel = {"softmax_scale": SCALE, "kv_lora_rank": LATENT}
        return segment_sparse_attention(q, latent, segment.topk[LAYER], **kernel, **call)

    def run(self, segment, packed, targets, backward=True):
        """One pass; `targets` are (result tensors, first row) of each sequence of the segment."""
        q, latent, dout, *index = (self.shard(segment, x) for x in packed)
        leaves = [x.requires_grad_(backward) for x in (q, latent)]
        with torch.no_grad():
            first = self.layer(segment, *leaves, index)  # a checkpoint's first forward: must leave nothing behind
        if not backward:
            return first
        out = self.layer(segment, *leaves, index)
        assert torch.equal(first, out)
        out.backward(dout)
        valid = segment.valid
        for rows in (out.detach(), *(x.grad for x in leaves)):
            assert torch.equal(rows[valid:], torch.zeros_like(rows[valid:]))
        assert (segment.topk[LAYER][valid:] == -1).all()
        for run in segment.runs:
            result, first_row = targets[run.sequence]
            rows = slice(first_row + run.start, first_row + run.stop)
            values = (segment.topk[LAYER], out.detach(), *(x.grad for x in leaves))
            for target, value in zip(result, values, strict=True):
                target[rows] = value[run.rows].double()
        return out.detach()

    def path(self, sequence, lengths, start, *, state):
        """Prefill the segments of a sequence behind `start` tokens; returns the walk back over them."""
        first_boundary = len(state.layouts_before(1 << 30))
        tensors, done = self.sequences[sequence], []
        total = 0
        for i, length in enumerate(lengths):
            held = state.rows("latent", LAYER).num_rows
            piece = slice(total, total + length)
            index = first_boundary + i
            segment = self.segment(Mode.PREFILL, index, start + total, (length,), held, state)
            out = self.run(segment, [x[piece] for x in tensors], None, backward=False)
            done.append((index, piece, held, out))
            total += length
        assert total == len(tensors[0])

        def walk():
            for index, piece, held, prefilled in reversed(done):
                lengths = (piece.stop - piece.start,)
                segment = self.segment(Mode.WALK, index, start + piece.start, lengths, held, state)
                out = self.run(segment, [x[piece] for x in tensors], [(self.results[sequence], piece.start)])
                assert torch.equal(out, prefilled)
                state.truncate(num_rows=held, boundary=index)

        return walk

    def train(self, segment_lengths, microbatches, blocks=None):
        """Prefill in segments, replay branches packed as `microbatches`, walk back; `blocks` as paths on forks."""
        walk_prompt = self.path(0, segment_lengths, 0, state=self.state)
        total, rows = len(self.sequences[0][0]), self.state.rows("latent", LAYER)
        held = rows.num_rows
        for microbatch in microbatches:
            branches = [self.sequences[1 + branch] for branch in microbatch]
            lengths = tuple(len(branch[0]) for branch in branches)
            segment = self.segment(Mode.REPLAY, len(segment_lengths), total, lengths, held)
            packed = [torch.cat(parts) for parts in zip(*branches, strict=True)]
            self.run(segment, packed, [(self.results[1 + branch], 0) for branch in microbatch])
        for branch, lengths in (blocks or {}).items():
            self.path(1 + branch, lengths, total, state=self.state.fork())()
        assert rows.num_rows == self.state.rows("index_key", LAYER).num_rows == held
        walk_prompt()
        assert rows.num_rows == 0 and not self.state.layouts
        return self.results


def assert_equals_dense(results, reference, dtype, what):
    """Each tensor of each sequence; `results` may come from several ranks, each with NaN where it owns nothing."""
    for sequence, wanted in enumerate(reference):
        for name, *parts, want in zip(NAMES, *(rank[sequence] for rank in results), wanted, strict=True):
            owners = sum((~part.isnan()).int() for part in parts)
            assert torch.equal(owners, torch.ones_like(owners)), (what, sequence, name)
            got = sum(part.nan_to_num() for part in parts)
            if name == "positions":
                assert torch.equal(got.int(), want), (what, sequence)
            else:
                error = ((got - want).norm() / want.norm().clamp(min=1.0)).item()
                assert error <= TOLERANCE[dtype], (what, sequence, name, error)


CASES = {  # segment lengths of the prompt, branch lengths, microbatches, branches walked in blocks
    "ragged": ([5, 1, 9, 16, 2], [6, 1, 11], [[0, 1, 2]]),
    "one_by_one": ([8, 8, 8], [6, 1, 11], [[0], [1], [2]]),
    "no_prefix": ([], [6, 1], [[0, 1]]),
    "one_token_prompt": ([1], [1], [[0]]),
    "one_segment": ([13], [3, 4], [[1], [0]]),
    "blocks": ([4, 7], [9, 5], [[1]], {0: [2, 1, 6]}),
}


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
