"""One prompt group as this rank runs it: its segments, microbatches, passes, inputs and prefix state."""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from longstraw_megatron.batch import PromptGroup, split_microbatches
from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.layout import SegmentLayout, Style, cut_sequences, piece_of
from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.schedule import GroupShape
from longstraw_megatron.segments.segment import Mode, positions_of
from longstraw_megatron.state import PrefixState, StateOptions

PAD_TOKEN = 0  # what padding rows embed; they reach no state and no loss
NO_TARGET = -1


@dataclass(frozen=True)
class CutOptions:
    """How prompts and branches are cut into segments and over ranks."""

    segment_length: int
    branches_per_microbatch: int = 1
    response_block: int | None = None  # tokens of a block of a long response; None: responses are whole
    style: Style = "contiguous"
    row_multiple: int = 1  # rows of a shard are a multiple of this (TP under sequence parallelism)


@dataclass(frozen=True)
class GroupRows:
    """The padded sizes that ranks in lockstep share: rows of every prompt segment and of every microbatch.

    A microbatch's blocks before its last one, of which `microbatch_rows` tells, are in `block_rows`.
    """

    segment_rows: tuple[int, ...]
    microbatch_rows: tuple[int, ...]
    block_rows: tuple[tuple[int, ...], ...]  # of each microbatch


def segment_lengths(prefix_length: int, segment_length: int) -> list[int]:
    """Lengths of the prompt segments; none for an empty prefix."""
    return [min(segment_length, prefix_length - start) for start in range(0, prefix_length, segment_length)]


def earlier_blocks(group: PromptGroup, microbatch: list[int], response_block: int | None) -> list[int]:
    """Lengths of a microbatch's blocks before its last one; none where the whole branch is one."""
    longest = max(len(group.branches[i]) for i in microbatch)
    return [] if response_block is None else [response_block] * ((longest - 1) // response_block)


@dataclass(frozen=True)
class GroupCut:
    """A prompt group cut into segments and microbatches, over all context-parallel ranks."""

    segment_layouts: tuple[SegmentLayout, ...]
    branch_layouts: tuple[SegmentLayout, ...]  # of each microbatch's last block, which is mostly its only one
    microbatches: tuple[tuple[int, ...], ...]  # branches of each; fillers of lockstep have none, and come last
    block_layouts: tuple[tuple[SegmentLayout, ...], ...]  # of its earlier blocks; fillers among them come first

    @property
    def cp_size(self) -> int:
        return (*self.segment_layouts, *self.branch_layouts)[0].cp_size

    @property
    def rows(self) -> GroupRows:
        return GroupRows(
            tuple(layout.rows for layout in self.segment_layouts),
            tuple(layout.rows for layout in self.branch_layouts),
            tuple(tuple(layout.rows for layout in layouts) for layouts in self.block_layouts),
        )


def cut_group(
    group: PromptGroup | None, options: CutOptions, *, cp_size: int, rows: GroupRows | None = None
) -> GroupCut:
    """Cut `group` (None: nothing but fillers), padded to the sizes of `rows` where they are given."""
    lengths = segment_lengths(len(group.prefix_tokens), options.segment_length) if group is not None else []
    block = options.response_block
    microbatches = split_microbatches(group, options.branches_per_microbatch, block) if group is not None else []
    earlier = [earlier_blocks(group, microbatch, block) for microbatch in microbatches]
    rows = rows or GroupRows((1,) * len(lengths), (1,) * len(microbatches), tuple((1,) * len(e) for e in earlier))
    lengths += [0] * (len(rows.segment_rows) - len(lengths))
    fillers = len(rows.microbatch_rows) - len(microbatches)
    microbatches, earlier = microbatches + [[]] * fillers, earlier + [[]] * fillers
    earlier = [[0] * (len(sizes) - len(e)) + e for e, sizes in zip(earlier, rows.block_rows, strict=True)]

    def cut(sequences: list[int], min_rows: int) -> SegmentLayout:
        return cut_sequences(
            sequences, cp_size=cp_size, multiple=options.row_multiple, style=options.style, min_rows=min_rows
        )

    return GroupCut(
        tuple(cut([length], size) for length, size in zip(lengths, rows.segment_rows, strict=True)),
        tuple(
            cut([len(group.branches[i]) - sum(before) for i in microbatch] or [0], size)
            for microbatch, before, size in zip(microbatches, earlier, rows.microbatch_rows, strict=True)
        ),
        tuple(tuple(microbatch) for microbatch in microbatches),
        tuple(
            tuple(cut([length], size) for length, size in zip(before, sizes, strict=True))
            for before, sizes in zip(earlier, rows.block_rows, strict=True)
        ),
    )


class GroupWork:
    """A cut group on this rank; `group=None` is a rank that only keeps step with others, without a valid token.

    One prefix state per model chunk: virtual stages walk back at different times.
    """

    def __init__(
        self,
        group: PromptGroup | None,
        cut: GroupCut,
        state_options: StateOptions,
        *,
        cp_rank: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        num_chunks: int,
        device: torch.device,
        traffic: Traffic,
        moe_layers: tuple[int, ...] = (),
    ):
        self.moe_layers = moe_layers
        self.group = group
        self.traffic = traffic
        self.cp_rank = cp_rank
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.device = device
        self.prefix_length = len(group.prefix_tokens) if group is not None else 0
        self.segment_layouts = cut.segment_layouts
        self.branch_layouts = cut.branch_layouts
        self.microbatches = cut.microbatches
        self.block_layouts = cut.block_layouts
        self.shape = GroupShape(
            len(self.segment_layouts), len(self.microbatches), blocks=tuple(map(len, self.block_layouts))
        )
        lengths = [layout.num_tokens for layout in self.segment_layouts]
        self.starts = [0, *accumulate(lengths)]
        # rows_by_rank[i][r]: what cp rank r holds before segment i
        by_rank = [[0, *accumulate(layout.valid(r) for layout in self.segment_layouts)] for r in range(cut.cp_size)]
        self.rows_by_rank = list(zip(*by_rank, strict=True))
        self.prefix_rows = by_rank[cp_rank]
        pieces = [piece_of(layout.valid(cp_rank), tp_rank, tp_size) for layout in self.segment_layouts]
        # what this rank holds before each segment of what tensor-parallel ranks share out
        self.owned_rows = [0, *accumulate(piece.stop - piece.start for piece in pieces)]
        num_rows = {"num_rows": self.prefix_rows[-1], "num_owned_rows": self.owned_rows[-1]}
        self.states = [PrefixState(state_options, **num_rows) for _ in range(num_chunks)]
        self.paths: dict[tuple[int, int], PrefixState] = {}  # (microbatch, chunk) -> state of a branch in blocks
        self.logprobs: dict[int, Tensor] = {}  # branch -> [R] float32, filled by the last stage

    @property
    def num_segments(self) -> int:
        return len(self.segment_layouts)

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches)

    def prompt_pass(self, index: int, mode: Mode, chunk: int) -> SegmentPass:
        """The pass of prompt segment `index`: PREFILL or WALK."""
        rows = self.rows_by_rank[index]
        return self._pass(mode, index, self.starts[index], self.segment_layouts[index], rows, self.states[chunk])

    def branch_pass(self, microbatch: int, chunk: int) -> SegmentPass:
        """The pass of a microbatch of branches (of the last block): a branch starts at the last prompt token."""
        return self._branch_pass(Mode.REPLAY, microbatch, len(self.block_layouts[microbatch]), chunk)

    def block_pass(self, unit: int, mode: Mode, chunk: int) -> SegmentPass:
        """The pass of a block, counted over the group: PREFILL or WALK."""
        return self._branch_pass(mode, *self.shape.block_of(unit), chunk)

    def layouts_of(self, microbatch: int) -> tuple[SegmentLayout, ...]:
        """The layouts of a microbatch's blocks, the last one included."""
        return *self.block_layouts[microbatch], self.branch_layouts[microbatch]

    def _branch_pass(self, mode: Mode, microbatch: int, block: int, chunk: int) -> SegmentPass:
        layouts = self.layouts_of(microbatch)
        before = layouts[:block]
        rows = [held + sum(layout.valid(r) for layout in before) for r, held in enumerate(self.rows_by_rank[-1])]
        start = self.prefix_length + sum(layout.num_tokens for layout in before)
        state = self._path(microbatch, chunk)
        segment = self._pass(mode, self.num_segments + block, start, layouts[block], tuple(rows), state)
        segment.routed_experts = self._routed_experts(microbatch, block)
        return segment

    def _path(self, microbatch: int, chunk: int) -> PrefixState:
        """What a microbatch reads: the prompt's state, or that of its own path behind it."""
        if not self.block_layouts[microbatch]:
            return self.states[chunk]
        if (microbatch, chunk) not in self.paths:
            self.paths[microbatch, chunk] = self.states[chunk].fork()
        return self.paths[microbatch, chunk]

    def prompt_ids(self, index: int) -> Tensor:
        """Input ids of this rank's shard of prompt segment `index`, [1, rows]."""
        layout = self.segment_layouts[index]
        tokens = self.group.prefix_tokens[self.starts[index] : self.starts[index + 1]] if self.group else []
        return self._shard(tokens, layout, PAD_TOKEN)[None]

    def branch_ids(self, microbatch: int, block: int | None = None) -> Tensor:
        """Input ids of this rank's shard of a block (None: the last), [1, rows]: [last prompt token] + response[:-1]
        each."""
        inputs = [self.group.input_tokens(i) for i in self.microbatches[microbatch]]
        return self._shard(*self._of_block(inputs, microbatch, block), PAD_TOKEN)[None]

    def branch_targets(self, microbatch: int, block: int | None = None) -> Tensor:
        """Target ids of this rank's shard, [rows]; NO_TARGET for padding."""
        targets = [self.group.target_tokens(i) for i in self.microbatches[microbatch]]
        return self._shard(*self._of_block(targets, microbatch, block), NO_TARGET)

    def _of_block(
        self, sequences: list[np.ndarray], microbatch: int, block: int | None
    ) -> tuple[np.ndarray, SegmentLayout]:
        """(packed values, layout) of a block (None: the last) of a microbatch whose branches have `sequences`."""
        layouts = self.layouts_of(microbatch)
        block = len(layouts) - 1 if block is None else block
        start = sum(layout.num_tokens for layout in layouts[:block])
        return _concat(sequences)[start : start + layouts[block].num_tokens], layouts[block]

    def take_states(self, states: list[PrefixState]) -> None:
        """Take the states of an earlier capture of this group, by chunk: nothing is prefilled."""
        self.states = states
        self.shape = replace(self.shape, num_segments=0)

    def release(self, index: int, chunk: int) -> None:
        """Forget the state that segment `index` and later ones made: nobody reads it any more."""
        self.states[chunk].truncate(num_rows=self.prefix_rows[index], boundary=index)

    def release_block(self, unit: int, chunk: int) -> None:
        """Likewise for a block of a branch; with its first one the branch's path is gone."""
        microbatch, block = self.shape.block_of(unit)
        before = sum(layout.valid(self.cp_rank) for layout in self.block_layouts[microbatch][:block])
        state = self.paths[microbatch, chunk]
        state.truncate(num_rows=self.prefix_rows[-1] + before, boundary=self.num_segments + block)
        if block == 0:
            self.drop_path(microbatch, chunk)

    def drop_path(self, microbatch: int, chunk: int) -> None:
        """Forget a branch's own state, if it has any."""
        self.paths.pop((microbatch, chunk), None)

    def _routed_experts(self, microbatch: int, block: int) -> dict[int, Tensor] | None:
        """Router replay: for each MoE layer the experts [rows, top-k] that came with the rollouts, if they did."""
        given = [self.group.branches[i].routed_experts for i in self.microbatches[microbatch]]
        if not given or any(experts is None for experts in given):
            return None
        packed, layout = self._of_block(given, microbatch, block)
        index = layout.packed_index(self.cp_rank)
        local = np.zeros((layout.rows, *given[0].shape[1:]), dtype=np.int64)
        local[: len(index)] = packed[index]
        experts = torch.from_numpy(local).to(self.device)
        return {layer: experts[:, i] for i, layer in enumerate(self.moe_layers)}

    def _shard(self, packed: np.ndarray | list, layout: SegmentLayout, fill: int) -> Tensor:
        """packed [tokens of the segment] -> this rank's rows [rows] on the device."""
        rows = np.full(layout.rows, fill, dtype=np.int64)
        index = layout.packed_index(self.cp_rank)
        rows[: len(index)] = np.asarray(packed, dtype=np.int64)[index]
        return torch.from_numpy(rows).to(self.device)

    def _pass(
        self,
        mode: Mode,
        index: int,
        start: int,
        layout: SegmentLayout,
        rows_by_rank: tuple[int, ...],
        state: PrefixState,
    ) -> SegmentPass:
        return SegmentPass(
            mode=mode,
            index=index,
            start=start,
            prefix_rows=rows_by_rank[self.cp_rank],
            prefix_rows_by_rank=rows_by_rank,
            traffic=self.traffic,
            layout=layout,
            cp_rank=self.cp_rank,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            state=state,
            positions=positions_of(layout, self.cp_rank, start, self.device),
        )


def _concat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
