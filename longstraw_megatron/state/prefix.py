"""What a prompt leaves behind on one rank and pipeline stage: DESIGN section 2's table.

A layer asks for its table by kind and layer number; it is made on first use. Forward never changes a state except
in prefill; gradients are added in backward only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw_megatron.layout import SegmentLayout
from longstraw_megatron.state.accumulate import Rounding
from longstraw_megatron.state.boundaries import BoundaryStates
from longstraw_megatron.state.pages import PagedRows
from longstraw_megatron.state.residence import OnDevice, Residence

KINDS = ("kv", "latent", "index_key")
# Rows that are gathered by index are kept in few pages on the device where their number is known: a selection over one
# page needs no merging of partial results. From the host a page is copied whole, so there their pages are as others'.
GATHERED_KINDS = ("latent",)
GATHERED_PAGE_LENGTH = 1 << 20  # rows, in memory 1.2 GB of latents of GLM-5.2 in bfloat16
# Rows of whole tokens, which tensor-parallel ranks share out; keys and values belong to a rank's heads.
OWNED_KINDS = ("latent", "index_key")


@dataclass(frozen=True)
class StateOptions:
    """How prefix state is kept."""

    exact: bool  # gradients flow into the prompt: keep every boundary, make accumulators
    page_length: int = 65536  # rows; of latents on the device GATHERED_PAGE_LENGTH
    grad_dtype: torch.dtype | None = None  # None: float32, or float64 for float64 state
    grad_rounding: Rounding = "nearest"  # how sums come to a grad_dtype of fewer bits
    residence: Residence = field(default_factory=OnDevice)  # where rows and boundaries rest between uses


class PrefixState:
    """State of one prompt (or, forked, of a branch's own path behind it).

    Kinds of rows: `kv` (k, v of softmax attention), `latent` (MLA latent with the roped key), `index_key` (DSA
    indexer). `num_rows` is what this rank expects to hold in all, `num_owned_rows` likewise of the kinds that
    tensor-parallel ranks share out.
    """

    def __init__(
        self,
        options: StateOptions,
        *,
        num_rows: int | None = None,
        num_owned_rows: int | None = None,
        parent: "PrefixState | None" = None,
    ):
        self.options = options
        self.num_rows = num_rows
        self.num_owned_rows = num_rows if num_owned_rows is None else num_owned_rows
        self.parent = parent
        self.experts: dict[tuple[int, int], Tensor] = {}  # (layer_number, segment index) -> uint8/int16 [tokens, top-k]
        self.layouts: dict[int, tuple[int, SegmentLayout]] = {}  # segment index -> (first position, layout)
        self._rows: dict[tuple[str, int], PagedRows] = {}
        self._boundaries: dict[int, BoundaryStates] = {}

    @property
    def exact(self) -> bool:
        return self.options.exact

    @property
    def walked(self) -> bool:
        """Whether segments that append to this state are walked back: those of an exact prompt, and of a branch."""
        return self.options.exact or self.parent is not None

    def fork(self) -> "PrefixState":
        """A state behind this one, for the segments of one branch: reads both, appends to itself."""
        return PrefixState(self.options, parent=self)

    def rows(self, kind: str, layer_number: int) -> PagedRows:
        key = (kind, layer_number)
        if key not in self._rows:
            if self.parent is not None:
                self._rows[key] = self.parent.rows(kind, layer_number).fork()
            else:
                capacity = self.num_owned_rows if kind in OWNED_KINDS else self.num_rows
                page_length = self.options.page_length
                if kind in GATHERED_KINDS and capacity and not self.options.residence.stages:
                    page_length = min(capacity, GATHERED_PAGE_LENGTH)
                self._rows[key] = PagedRows(
                    page_length=page_length,
                    capacity=capacity,
                    grad_dtype=self.options.grad_dtype,
                    takes_grad=self.walked,
                    residence=self.options.residence,
                    rounding=self.options.grad_rounding,
                    seed=layer_number * len(KINDS) + KINDS.index(kind),
                )
        return self._rows[key]

    def boundaries(self, layer_number: int) -> BoundaryStates:
        if layer_number not in self._boundaries:
            parent = self.parent.boundaries(layer_number) if self.parent is not None else None
            self._boundaries[layer_number] = BoundaryStates(
                keep_all=self.walked, parent=parent, residence=self.options.residence
            )
        return self._boundaries[layer_number]

    def tables(self) -> Iterator[tuple[str, int, PagedRows]]:
        """(kind, layer number, rows) of every table made so far."""
        for (kind, layer_number), rows in self._rows.items():
            yield kind, layer_number, rows

    def boundary_tables(self) -> Iterator[tuple[int, BoundaryStates]]:
        """(layer number, boundary states) of every layer that has any."""
        yield from self._boundaries.items()

    def layouts_before(self, boundary: int) -> list[tuple[int, SegmentLayout]]:
        """(first position, layout) of the segments before `boundary`, in order; layers that need them record them."""
        earlier = self.parent.layouts_before(boundary) if self.parent is not None else []
        return earlier + [self.layouts[index] for index in sorted(self.layouts) if index < boundary]

    def truncate(self, *, num_rows: int, boundary: int) -> None:
        """Forget everything behind `boundary`, where this rank held `num_rows` rows: its walk is done."""
        for rows in self._rows.values():
            rows.truncate_at(boundary, num_rows)
        for boundaries in self._boundaries.values():
            boundaries.truncate(boundary)
        for key in [key for key in self.experts if key[1] >= boundary]:
            del self.experts[key]
        for index in [index for index in self.layouts if index >= boundary]:
            del self.layouts[index]

    def nbytes(self) -> dict[str, int]:
        """Bytes by item: rows, boundaries, experts, and the gradients of the first two."""
        return {
            "rows": sum(rows.value_bytes() for rows in self._rows.values()),
            "rows_grad": sum(rows.grad_bytes() for rows in self._rows.values()),
            "boundaries": sum(states.value_bytes() for states in self._boundaries.values()),
            "boundaries_grad": sum(states.grad_bytes() for states in self._boundaries.values()),
            "experts": sum(experts.nbytes for experts in self.experts.values()),
        }
