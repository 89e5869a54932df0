"""Segment attention against dense float64 autograd over the whole sequence, in every transfer form."""

import math

import pytest
import torch

from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.segments.attention import segment_attention
from longstraw_megatron.segments.segment import Mode, Segment, positions_of
from longstraw_megatron.state import PrefixState, StateOptions

NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM, LAYER = 4, 2, 8, 3
SCALE = 1 / math.sqrt(HEAD_DIM)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6}


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
    ):
        self.sequences, self.cp_rank, self.cp_size, self.cp_group = sequences, cp_rank, cp_size, cp_group
        self.style, self.multiple, self.dtype = style, multiple, dtype
        self.state = PrefixState(StateOptions(exact=exact, page_length=page_length))
        self.results = [[torch.full_like(sequence[i], float("nan")) for i in (3, 0, 1, 2)] for sequence in sequences]

    def segment(self, mode, index, start, lengths, prefix_rows):
        layout = cut_sequences(lengths, cp_size=self.cp_size, multiple=self.multiple, style=self.style)
        return Segment(
            mode=mode,
            index=index,
            start=start,
            prefix_rows=prefix_rows,
            layout=layout,
            cp_rank=self.cp_rank,
            state=self.state,
            positions=positions_of(layout, self.cp_rank, start),
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
        call = {"segment": segment, "layer_number": LAYER, "cp_group": self.cp_group, "softmax_scale": SCALE}
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

    def train(self, segment_lengths, microbatches):
        """Prefill in segments, replay branches packed as `microbatches` (lists of branch indices), walk back."""
        prompt, results = self.sequences[0], self.results
        starts, prefix_rows, total = [], [], 0
        for index, length in enumerate(segment_lengths):
            starts.append(total)
            prefix_rows.append(self.state.rows("kv", LAYER).num_rows)
            segment = self.segment(Mode.PREFILL, index, total, (length,), prefix_rows[-1])
            self.run(segment, [x[total : total + length] for x in prompt], None, backward=False)
            total += length
        assert total == prompt[0].shape[0]
        held = self.state.rows("kv", LAYER).num_rows
        for microbatch in microbatches:
            branches = [self.sequences[1 + branch] for branch in microbatch]
            lengths = tuple(branch[0].shape[0] for branch in branches)
            segment = self.segment(Mode.REPLAY, len(segment_lengths), total, lengths, held)
            packed = [torch.cat(parts) for parts in zip(*branches, strict=True)]
            self.run(segment, packed, [(results[1 + branch], 0) for branch in microbatch])
        assert self.state.rows("kv", LAYER).num_rows == held
        for index in reversed(range(len(segment_lengths))):
            rows = slice(starts[index], starts[index] + segment_lengths[index])
            segment = self.segment(Mode.WALK, index, rows.start, (segment_lengths[index],), prefix_rows[index])
            self.run(segment, [x[rows] for x in prompt], [(results[0], rows.start)])
            self.state.truncate(num_rows=prefix_rows[index], boundary=index)
        return self.results


CASES = {  # segment lengths of the prompt, branch lengths, microbatches
    "ragged": ([5, 1, 9, 16, 2], [6, 1, 11], [[0, 1, 2]]),
    "one_by_one": ([8, 8, 8], [6, 1, 11], [[0], [1], [2]]),
    "no_prefix": ([], [6, 1], [[0, 1]]),
    "one_token_prompt": ([1], [1], [[0]]),
    "one_segment": ([13], [3, 4], [[1], [0]]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_one_rank_equals_dense(case, multiple, dtype):
    segment_lengths, lengths, microbatches = CASES[case]
    sequences = make_sequences(sum(segment_lengths), lengths)
    got = Rank(sequences, multiple=multiple, dtype=dtype).train(segment_lengths, microbatches)
    for sequence, (results, wanted) in enumerate(zip(got, dense_reference(sequences), strict=True)):
        if sequence == 0 and not segment_lengths:
            continue
        errors = dict(zip(("out", "dq", "dk", "dv"), map(relative_error, results, wanted), strict=True))
        worst = max(errors, key=errors.get)
        assert errors[worst] <= TOLERANCE[dtype], (sequence, worst, errors)
