"""What a forward pass is: one segment, its mode, and the state that it reads.

It travels as an argument through the model (`mcore.segment_pass.SegmentPass`), never as ambient state: under
recompute and 1F1B another microbatch's forward runs between a forward and its recompute.
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from longstraw_megatron.comm import Traffic
from longstraw_megatron.layout import Run, SegmentLayout, piece_of, split_shards
from longstraw_megatron.segments.token_map import TokenMaps
from longstraw_megatron.state import PrefixState


class Mode(Enum):
    PREFILL = "prefill"  # no graph; the segment's state is appended
    REPLAY = "replay"  # forward and backward; state is only read
    WALK = "walk"  # recompute of a prefilled segment; backward injects the gradient of the state it made


@dataclass(eq=False, kw_only=True)
class Segment:
    """One segment as one rank sees it.

    `index` is the boundary of `state` that it starts from, `start` the position of the first token of each of its
    sequences, `prefix_rows` the rows of this rank's shards before it.

    Tensor-parallel ranks see the same tokens. What does not belong to their heads (MLA latents, index keys) they share
    out: of each shard a rank keeps the rows `owned`, its piece in `owner_layout`, over `tp_size` times as many ranks.
    """

    mode: Mode
    index: int
    start: int
    prefix_rows: int
    layout: SegmentLayout
    cp_rank: int
    tp_rank: int = 0
    tp_size: int = 1
    state: PrefixState
    positions: Tensor  # [rows] int64, absolute; padding has `start`
    topk: dict[int, Tensor] = field(default_factory=dict)  # layer_number -> selected positions, kept to backward's end
    routed_experts: dict[int, Tensor] | None = None  # layer_number -> [rows, top-k], given with the rollouts
    experts: dict[int, Tensor] = field(default_factory=dict)  # layer_number -> experts chosen, kept to backward's end
    token_maps: TokenMaps | None = None  # which rank and row hold a token; made once, where a layer needs it
    prefix_rows_by_rank: tuple[int, ...] | None = None  # over the CP ranks; asked for, once, where not given
    traffic: Traffic = field(default_factory=Traffic)  # counts what its layers send; shared by passes, if given

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of this rank's shard."""
        return self.layout.runs[self.cp_rank]

    @property
    def valid(self) -> int:
        """Rows of this rank's shard that hold a token; the rest is padding."""
        return self.layout.valid(self.cp_rank)

    @property
    def rows(self) -> int:
        """Rows of this rank's shard, padding included."""
        return self.layout.rows

    @property
    def owner_rank(self) -> int:
        """This rank's place among those that share the tokens: tensor-parallel ranks side by side."""
        return self.cp_rank * self.tp_size + self.tp_rank

    @cached_property
    def owner_layout(self) -> SegmentLayout:
        """The layout over all owners."""
        return split_shards(self.layout, self.tp_size)

    @cached_property
    def owned(self) -> slice:
        """The valid rows of this rank's shard that it keeps."""
        return piece_of(self.valid, self.tp_rank, self.tp_size)

    def owned_rows(self, x: Tensor) -> Tensor:
        """This rank's piece of x [rows, ...]: [owner_layout.rows, ...], zeros behind the rows `owned`."""
        if self.tp_size == 1:
            return x
        mine = x.new_zeros(self.owner_layout.rows, *x.shape[1:])
        mine[: self.owned.stop - self.owned.start] = x[self.owned]
        return mine

    @property
    def reads_with_grad(self) -> bool:
        """Whether backward adds to accumulators of the state that the segment read, where rows and boundaries take
        gradients: a detached prompt's do not, a branch's own do."""
        return self.mode is not Mode.PREFILL and self.state.walked


def positions_of(layout: SegmentLayout, cp_rank: int, start: int, device: torch.device | str = "cpu") -> Tensor:
    """Absolute positions of the rows of a shard, [rows] int64."""
    return torch.tensor(layout.token_offsets(cp_rank), dtype=torch.int64, device=device) + start
