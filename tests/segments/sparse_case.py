"""A layer of index selection and sparse attention over segments, and the same by a dense float64 oracle.

Index queries and keys are small integers, so that scores are exact however they are summed and most of them tie.
"""

import torch
import torch.distributed as dist

from longstraw_megatron.comm import Traffic
from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.segments.index_selection import select_topk
from longstraw_megatron.segments.segment import Mode, Segment, positions_of
from longstraw_megatron.segments.sparse_attention import segment_sparse_attention
from longstraw_megatron.state import PrefixState, StateOptions

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
    """One context-parallel rank: prefill, replay and walk of the same sequences, results at their global rows.

    With `tp_group` it is one of the ranks that share the shard's tokens, and has a part of the heads.
    """

    def __init__(
        self, sequences, *, cp_rank=0, cp_size=1, cp_group=None, style="contiguous", multiple=1, exact=True,
        page_length=7, one_page=False, dtype=torch.float64, transfer=None, tp_group=None,
    ):  # fmt: skip
        self.sequences, self.cp_rank, self.cp_size, self.cp_group = sequences, cp_rank, cp_size, cp_group
        self.style, self.multiple, self.dtype, self.transfer = style, multiple, dtype, transfer
        self.tp_group = tp_group
        self.tp_rank, self.tp_size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
        part = NUM_HEADS // self.tp_size
        self.heads = slice(self.tp_rank * part, (self.tp_rank + 1) * part)
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
            tp_rank=self.tp_rank, tp_size=self.tp_size, state=state or self.state,
            positions=positions_of(layout, self.cp_rank, start), traffic=self.traffic,
        )  # fmt: skip

    def held(self, state):
        """Rows of this rank's shards before the next segment; with `tp_group`, its peers' too."""
        first = self.cp_rank * self.tp_size
        layouts = [layout for _, layout in state.layouts_before(1 << 30)]
        return sum(layout.valid(first + part) for layout in layouts for part in range(self.tp_size))

    def shard(self, segment, whole):
        """This rank's rows of the packed tensor, NaN in its padding."""
        rows = whole.new_full((segment.rows, *whole.shape[1:]), float("nan"), dtype=self.dtype)
        rows[: segment.valid] = whole[segment.layout.packed_index(self.cp_rank)].to(self.dtype)
        return rows

    def layer(self, segment, q, latent, index):
        """What one layer does: select, unless the pass already knows, and attend."""
        call = {"segment": segment, "layer_number": LAYER, "cp_group": self.cp_group, "transfer": self.transfer}
        if LAYER not in segment.topk:
            segment.topk[LAYER] = select_topk(*index, index_topk=TOPK, tp_group=self.tp_group, **call)
        kernel = {"softmax_scale": SCALE, "kv_lora_rank": LATENT}
        return segment_sparse_attention(q, latent, segment.topk[LAYER], **kernel, **call)

    def run(self, segment, packed, targets, backward=True):
        """One pass; `targets` are (result tensors, first row) of each sequence of the segment."""
        q, latent, dout, *index = (self.shard(segment, x) for x in packed)
        q, dout = q[:, self.heads].contiguous(), dout[:, self.heads]
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
        grad_q, grad_latent = (x.grad for x in leaves)
        if self.tp_size > 1:
            others = torch.ones_like(grad_latent)
            others[segment.owned] = 0
            assert not (grad_latent * others).any(), "a row is another rank's"
            dist.all_reduce(grad_latent, group=self.tp_group)
        for run in segment.runs:
            result, first_row = targets[run.sequence]
            rows = slice(first_row + run.start, first_row + run.stop)
            positions, whole_out, dq, dlatent = result
            whole_out[rows, self.heads] = out.detach()[run.rows].double()
            dq[rows, self.heads] = grad_q[run.rows].double()
            if self.tp_rank == 0:
                positions[rows] = segment.topk[LAYER][run.rows].double()
                dlatent[rows] = grad_latent[run.rows].double()
        return out.detach()

    def path(self, sequence, lengths, start, *, state):
        """Prefill the segments of a sequence behind `start` tokens; returns the walk back over them."""
        first_boundary = len(state.layouts_before(1 << 30))
        tensors, done = self.sequences[sequence], []
        total = 0
        for i, length in enumerate(lengths):
            held = self.held(state)
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
        held, owned = self.held(self.state), rows.num_rows
        for microbatch in microbatches:
            branches = [self.sequences[1 + branch] for branch in microbatch]
            lengths = tuple(len(branch[0]) for branch in branches)
            segment = self.segment(Mode.REPLAY, len(segment_lengths), total, lengths, held)
            packed = [torch.cat(parts) for parts in zip(*branches, strict=True)]
            self.run(segment, packed, [(self.results[1 + branch], 0) for branch in microbatch])
        for branch, lengths in (blocks or {}).items():
            self.path(1 + branch, lengths, total, state=self.state.fork())()
        assert rows.num_rows == self.state.rows("index_key", LAYER).num_rows == owned
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
