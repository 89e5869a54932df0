"""Where tokens lie: from positions of a prefix, or from a segment's own tokens, to (context-parallel rank, row).

Every rank can tell for all ranks, since all know the layouts of the segments. A map is a table of stretches of
consecutive tokens in consecutive rows; neighbours are joined, so that one rank's prefix is a single stretch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longstraw_megatron.layout import SegmentLayout


class Stretch(NamedTuple):
    """Tokens [token, token + length) in rows [row, row + length) of a rank."""

    token: int
    length: int
    cp_rank: int
    row: int


def own_stretches(layout: SegmentLayout) -> list[Stretch]:
    """A segment's tokens in packed order (its sequences one after the other)."""
    starts = layout.sequence_starts
    return [
        Stretch(starts[run.sequence] + run.start, run.length, cp_rank, run.offset)
        for cp_rank, runs in enumerate(layout.runs)
        for run in runs
    ]


def prefix_stretches(segments: Iterable[tuple[int, SegmentLayout]]) -> list[Stretch]:
    """Positions of a prefix whose segments, (first position, layout) in order, appended their valid rows."""
    stretches: list[Stretch] = []
    held: dict[int, int] = {}
    for start, layout in segments:
        if len(layout.lengths) > 1:
            raise ValueError(f"A prefix is one sequence, and a segment of it has {len(layout.lengths)}.")
        for token, length, cp_rank, row in own_stretches(layout):
            stretches.append(Stretch(start + token, length, cp_rank, held.get(cp_rank, 0) + row))
        for cp_rank in range(layout.cp_size):
            held[cp_rank] = held.get(cp_rank, 0) + layout.valid(cp_rank)
    return stretches


class TokenMap:
    """Tokens 0 .. num_tokens - 1, each on one rank."""

    def __init__(self, stretches: Iterable[Stretch], *, cp_size: int, device: torch.device | str = "cpu"):
        self.device = device
        self.stretches: list[Stretch] = []
        for stretch in sorted(stretches):
            last = self.stretches[-1] if self.stretches else None
            if stretch.token != (last.token + last.length if last else 0):
                raise ValueError(f"A token map has no gaps: {stretch} comes after {last}.")
            if last and stretch.cp_rank == last.cp_rank and stretch.row == last.row + last.length:
                self.stretches[-1] = last._replace(length=last.length + stretch.length)
            else:
                self.stretches.append(stretch)
        self.rows_by_rank = tuple(sum(s.length for s in self.stretches if s.cp_rank == rank) for rank in range(cp_size))
        self._starts = torch.tensor([s.token for s in self.stretches], dtype=torch.int32, device=device)
        self._shifts: dict[tuple[int | None, int], tuple[Tensor, Tensor]] = {}
        self._tokens: dict[int, Tensor] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self.rows_by_rank)

    def local_rows(self, tokens: Tensor, cp_rank: int) -> Tensor:
        """Rows of `tokens` (int32, any shape) on `cp_rank`, int32; -1 for tokens of other ranks and for -1."""
        if self.rows_by_rank[cp_rank] == 0:
            return torch.full_like(tokens, -1)
        if len(self.stretches) == 1:
            return tokens
        stretch, shifts, held = self._lookup(tokens, cp_rank, 0)
        return torch.where((tokens >= 0) & held[stretch], tokens + shifts[stretch], -1)

    def flat_rows(self, tokens: Tensor, rows_per_rank: int) -> Tensor:
        """`cp_rank * rows_per_rank + row` of `tokens` (int32, any shape), int32; -1 for -1."""
        if self.num_tokens == 0:
            return torch.full_like(tokens, -1)
        stretch, shifts, _ = self._lookup(tokens, None, rows_per_rank)
        return torch.where(tokens >= 0, tokens + shifts[stretch], -1)

    def tokens_of(self, cp_rank: int) -> Tensor:
        """The tokens that a rank's rows hold, int32 [rows]."""
        if cp_rank not in self._tokens:
            held = sorted((s for s in self.stretches if s.cp_rank == cp_rank), key=lambda s: s.row)
            pieces = [torch.arange(s.token, s.token + s.length, dtype=torch.int32) for s in held]
            tokens = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32)
            self._tokens[cp_rank] = tokens.to(self.device)
        return self._tokens[cp_rank]

    def _lookup(self, tokens: Tensor, cp_rank: int | None, rows_per_rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """(stretch of each token, row minus token by stretch, whether `cp_rank` holds a stretch)."""
        key = (cp_rank, rows_per_rank)
        if key not in self._shifts:
            shifts = [s.cp_rank * rows_per_rank + s.row - s.token for s in self.stretches]
            held = [s.cp_rank == cp_rank for s in self.stretches]
            self._shifts[key] = (
                torch.tensor(shifts, dtype=torch.int32, device=self.device),
                torch.tensor(held, dtype=torch.bool, device=self.device),
            )
        stretch = torch.bucketize(tokens, self._starts, right=True, out_int32=True).sub_(1).clamp_min_(0)
        return stretch, *self._shifts[key]


@dataclass(frozen=True, eq=False)
class TokenMaps:
    """Of one pass: `prefix` by position, `own` by packed order of the segment's tokens."""

    prefix: TokenMap
    own: TokenMap


def make_token_maps(
    segments: Iterable[tuple[int, SegmentLayout]], layout: SegmentLayout, device: torch.device | str
) -> TokenMaps:
    """Maps of a segment of `layout` behind the prefix of `segments`."""
    return TokenMaps(
        TokenMap(prefix_stretches(segments), cp_size=layout.cp_size, device=device),
        TokenMap(own_stretches(layout), cp_size=layout.cp_size, device=device),
    )
