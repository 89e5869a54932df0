"""What a forward pass is: one segment, its mode, and the state that it reads.

It travels as an argument through the model (`mcore.segment_pass.SegmentPass`), never as ambient state: under
recompute and 1F1B another microbatch's forward runs between a forward and its recompute.
"""

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from longstraw_megatron.comm import Traffic
from longstraw_megatron.layout import Run, SegmentLayout
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
    sequences, `prefix_rows` the rows that this rank held before it.
    """

    mode: Mode
    index: int
    start: int
    prefix_rows: int
    layout: SegmentLayout
    cp_rank: int
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
    def reads_with_grad(self) -> bool:
        """Whether backward adds to accumulators of the state that the segment read, where rows and boundaries take
        gradients: a detached prompt's do not, a branch's own do."""
        return self.mode is not Mode.PREFILL and self.state.walked


def positions_of(layout: SegmentLayout, cp_rank: int, start: int, device: torch.device | str = "cpu") -> Tensor:
    """Absolute positions of the rows of a shard, [rows] int64."""
    return torch.tensor(layout.token_offsets(cp_rank), dtype=torch.int64, device=device) + start
