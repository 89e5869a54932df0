"""Who owns which token: a segment's tokens cut over the context-parallel ranks.

A shard is a concatenation of *runs* (consecutive tokens of one sequence), followed by padding. A prompt segment is
one sequence; a microbatch of branches is several, each cut over the ranks by itself. All ranks have equally many
rows, a multiple of `multiple` (the tensor-parallel size under sequence parallelism).

Everything here is integer arithmetic on (lengths, size, rank): no process group, no tensor.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Style = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence in one rank's shard."""

    sequence: int  # index of the sequence in the segment
    start: int  # first token, counted from the start of its sequence
    length: int
    offset: int  # first row in the rank's shard

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def rows(self) -> slice:
        """The run's rows in its shard."""
        return slice(self.offset, self.offset + self.length)


@dataclass(frozen=True)
class SegmentLayout:
    """The shards of one segment: `runs[cp_rank]` in row order, then padding up to `rows`."""

    lengths: tuple[int, ...]  # valid tokens of each sequence
    runs: tuple[tuple[Run, ...], ...]
    rows: int

    @property
    def cp_size(self) -> int:
        return len(self.runs)

    @property
    def num_tokens(self) -> int:
        """Valid tokens over all ranks."""
        return sum(self.lengths)

    def valid(self, cp_rank: int) -> int:
        """Rows of the rank's shard that hold a token; the rest is padding."""
        return sum(run.length for run in self.runs[cp_rank])

    @cached_property
    def is_trivial(self) -> bool:
        """Whether the one shard is the one sequence itself, in order and without padding."""
        return self.cp_size == 1 and len(self.lengths) == 1 and self.rows == self.num_tokens

    @cached_property
    def sequence_starts(self) -> tuple[int, ...]:
        """Where each sequence begins in the packed order (sequences one after the other, no padding)."""
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return tuple(starts)

    def packed_index(self, cp_rank: int) -> list[int]:
        """For each valid row of the rank's shard, its token's place in the packed order."""
        return [
            self.sequence_starts[run.sequence] + run.start + i for run in self.runs[cp_rank] for i in range(run.length)
        ]

    def token_offsets(self, cp_rank: int) -> list[int]:
        """For each row, its token's place in its own sequence; 0 for padding."""
        offsets = [run.start + i for run in self.runs[cp_rank] for i in range(run.length)]
        return offsets + [0] * (self.rows - len(offsets))

    def gather_index(self) -> list[int]:
        """For each token in packed order, its row in the concatenation of all shards (`cp_rank * rows + row`)."""
        index = [0] * self.num_tokens
        for cp_rank in range(self.cp_size):
            for row, token in enumerate(self.packed_index(cp_rank)):
                index[token] = cp_rank * self.rows + row
        return index


def piece_of(valid: int, part: int, parts: int) -> slice:
    """Rows of a shard with `valid` tokens in its piece `part` of `parts`: consecutive, as equal as whole rows allow."""
    size = -(-valid // parts)
    return slice(min(part * size, valid), min((part + 1) * size, valid))


def split_shards(layout: SegmentLayout, parts: int) -> SegmentLayout:
    """Every shard cut into `parts` pieces of its valid rows: piece p of rank r is the shard of rank r * parts + p."""
    if parts == 1:
        return layout
    shards = []
    for cp_rank, runs in enumerate(layout.runs):
        for part in range(parts):
            piece = piece_of(layout.valid(cp_rank), part, parts)
            bounds = [(run, max(run.offset, piece.start), min(run.offset + run.length, piece.stop)) for run in runs]
            shards.append(
                tuple(
                    Run(run.sequence, run.start + first - run.offset, stop - first, first - piece.start)
                    for run, first, stop in bounds
                    if first < stop
                )
            )
    return SegmentLayout(layout.lengths, tuple(shards), -(-layout.rows // parts))


def cut_sequences(
    lengths: tuple[int, ...] | list[int],
    *,
    cp_size: int = 1,
    multiple: int = 1,
    style: Style = "contiguous",
    min_rows: int = 1,
) -> SegmentLayout:
    """Cut sequences of `lengths` tokens over `cp_size` ranks.

    `contiguous` gives rank r the r-th of cp_size pieces of each sequence; `zigzag` cuts 2 * cp_size pieces and gives
    rank r pieces r and 2 * cp_size - 1 - r, which balances causal attention. A rank may get nothing of a sequence.
    `min_rows` pads every shard to at least so many rows (ranks in lockstep run segments of equal size).
    """
    if cp_size < 1 or multiple < 1 or any(length < 0 for length in lengths):
        raise ValueError(
            f"cut_sequences needs cp_size, multiple >= 1 and lengths >= 0, got {cp_size=} {multiple=} {lengths=}."
        )
    shards: list[list[Run]] = [[] for _ in range(cp_size)]
    offsets = [0] * cp_size
    pieces = cp_size if style == "contiguous" or cp_size == 1 else 2 * cp_size
    for sequence, length in enumerate(lengths):
        piece = -(-length // pieces)
        for i in range(pieces):
            start, stop = min(i * piece, length), min((i + 1) * piece, length)
            cp_rank = i if i < cp_size else 2 * cp_size - 1 - i
            if stop == start:
                continue
            last = shards[cp_rank][-1] if shards[cp_rank] else None
            if last is not None and last.sequence == sequence and last.stop == start:
                shards[cp_rank][-1] = Run(sequence, last.start, last.length + stop - start, last.offset)
            else:
                shards[cp_rank].append(Run(sequence, start, stop - start, offsets[cp_rank]))
            offsets[cp_rank] += stop - start
    rows = max(*offsets, min_rows, 1)
    return SegmentLayout(tuple(lengths), tuple(tuple(shard) for shard in shards), -(-rows // multiple) * multiple)
