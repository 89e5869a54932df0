"""One Megatron tensor as rows of Hugging Face tensors: the same few numbers say how to read, write and shard it.

A Megatron tensor is a list of *sections*, one under the other; a section is a list of *spans*, each a run of rows of
one Hugging Face tensor. Tensor parallelism cuts every section into equal parts by itself, wherever that falls inside
its spans, and a rank holds its part of each section. A tensor that is cut along its columns has one section.

    in_proj      [q rows of qkv] [k rows] [v rows] [z] [b] [a]          six sections
    linear_qkv   [q0 q1 gate0 gate1 k v | q2 q3 gate2 gate3 k v | ...]  one section of interleaved spans
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longstraw_megatron.errors import RefusedError

Axis = Literal["rows", "columns", None]
Read = Callable[[str, slice, slice | None], Tensor]  # (tensor, rows, columns or None for all) -> that part of it


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, stop) of the Hugging Face tensor `source`."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Block:
    """A part of one rank's shard and where it lies in its source."""

    source: str
    source_rows: slice
    source_columns: slice | None  # None: all of them
    shard_rows: slice


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron tensor, by its name in the unsharded model.

    Layers are counted from 0 over all pipeline stages, experts over all expert-parallel ranks. `row_shape` is the
    shape of one row. `axis` is what tensor parallelism cuts (None: every rank holds all); for the tensors of `expert`
    that is the experts' tensor parallelism. Megatron's value is Hugging Face's plus `offset`. A `duplicate` holds
    again what another entry holds (the output layer of a tied model on a later stage): it is read, never written.
    """

    megatron: str
    sections: tuple[tuple[Span, ...], ...]
    row_shape: tuple[int, ...] = ()
    axis: Axis = None
    expert: int | None = None
    offset: float = 0.0
    duplicate: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Megatron's unsharded shape."""
        return (sum(span.stop - span.start for section in self.sections for span in section), *self.row_shape)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """The Hugging Face tensors that are wholly made of this entry, with their shapes, in order."""
        rows: dict[str, int] = {}
        for section in self.sections:
            for span in section:
                rows[span.source] = max(rows.get(span.source, 0), span.stop)
        return {source: (count, *self.row_shape) for source, count in rows.items()}

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """The shape that each of `tp_size` ranks holds."""
        dim = {"rows": 0, "columns": 1, None: None}[self.axis]
        return tuple(size // tp_size if i == dim else size for i, size in enumerate(self.shape))

    def blocks(self, tp_rank: int, tp_size: int) -> Iterator[Block]:
        """The parts of the rank's shard, from its first row to its last.

        Raises:
            RefusedError: `tp_size` does not divide what it has to cut.
        """
        columns = None
        if self.axis == "columns":
            width = self._part(self.row_shape[0], tp_size)
            columns = slice(tp_rank * width, (tp_rank + 1) * width)
        offset = 0  # rows of the shard before the section
        for section in self.sections:
            total = sum(span.stop - span.start for span in section)
            part = self._part(total, tp_size) if self.axis == "rows" else total
            first = tp_rank * part if self.axis == "rows" else 0
            begin = 0  # rows of the section before the span
            for span in section:
                length = span.stop - span.start
                low, high = max(begin, first), min(begin + length, first + part)
                if low < high:
                    source_rows = slice(span.start + low - begin, span.start + high - begin)
                    yield Block(span.source, source_rows, columns, slice(offset + low - first, offset + high - first))
                begin += length
            offset += part

    def _part(self, size: int, tp_size: int) -> int:
        if size % tp_size:
            raise RefusedError(
                f"{self.megatron} got tensor-parallel size {tp_size}, wanted a divisor of {size}, which it cuts; "
                "choose another parallel.tp (parallel.etp for experts)."
            )
        return size // tp_size

    def fill(self, shard: Tensor, read: Read, *, tp_rank: int, tp_size: int, gradient: bool = False) -> None:
        """Copy into `shard` what belongs there, reading no more than that; it keeps its dtype and device.

        A gradient is not shifted by the offset.
        """
        for block in self.blocks(tp_rank, tp_size):
            part = read(block.source, block.source_rows, block.source_columns)
            shard[block.shard_rows].copy_(part if gradient else _shifted(part, self.offset))

    def unpack(
        self, shards: Iterator[Tensor] | list[Tensor], tp_size: int, *, gradient: bool = False
    ) -> dict[str, Tensor]:
        """The Hugging Face tensors, on the CPU, from the shards of all tensor-parallel ranks in rank order.

        One shard (of rank 0) is enough where `axis` is None. A gradient is not shifted by the offset.
        """
        out: dict[str, Tensor] = {}
        for tp_rank, shard in enumerate(shards):
            for block in self.blocks(tp_rank, tp_size):
                if block.source not in out:
                    out[block.source] = torch.empty(self.source_shapes()[block.source], dtype=shard.dtype)
                part = shard[block.shard_rows].cpu()
                rows = out[block.source][block.source_rows]
                target = rows if block.source_columns is None else rows[:, block.source_columns]
                target.copy_(part if gradient else _shifted(part, -self.offset))
        return out


def _shifted(part: Tensor, offset: float) -> Tensor:
    """`part + offset`, in float32 at least, so that low precision rounds once."""
    if offset == 0:
        return part
    return part.to(torch.promote_types(part.dtype, torch.float32)) + offset


def whole(source: str, rows: int) -> tuple[Span, ...]:
    """A section that is all of one tensor."""
    return (Span(source, 0, rows),)
