"""One prompt group as this rank runs it: its segments, microbatches, passes, inputs and prefix state."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from longstraw_megatron.batch import PromptGroup, split_microbatches
from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.layout import SegmentLayout, Style, cut_sequences
from longstraw_megatron.mcore.segment_pass import SegmentPass
from longstraw_megatron.segments.segment import Mode, positions_of
from longstraw_megatron.state import PrefixState, StateOptions

PAD_TOKEN = 0  # what padding rows embed; they reach no state and no loss
NO_TARGET = -1


@dataclass(frozen=True)
class CutOptions:
    """How prompts and branches are cut into segments and over ranks."""

    segment_length: int
    branches_per_microbatch: int = 1
    style: Style = "contiguous"
    row_multiple: int = 1  # rows of a shard are a multiple of this (TP under sequence parallelism)


@dataclass(frozen=True)
class GroupRows:
    """The padded sizes that ranks in lockstep share: rows of every prompt segment and of every microbatch."""

    segment_rows: tuple[int, ...]
    microbatch_rows: tuple[int, ...]


def segment_lengths(prefix_length: int, segment_length: int) -> list[int]:
    """Lengths of the prompt segments; none for an empty prefix."""
    return [min(segment_length, prefix_length - start) for start in range(0, prefix_length, segment_length)]


@dataclass(frozen=True)
class GroupCut:
    """A prompt group cut into segments and microbatches, over all context-parallel ranks."""

    segment_layouts: tuple[SegmentLayout, ...]
    branch_layouts: tuple[SegmentLayout, ...]
    microbatches: tuple[tuple[int, ...], ...]  # branches of each; fillers of lockstep have none, and come last

    @property
    def cp_size(self) -> int:
        return (*self.segment_layouts, *self.branch_layouts)[0].cp_size

    @property
    def rows(self) -> GroupRows:
        return GroupRows(
            tuple(layout.rows for layout in self.segment_layouts), tuple(layout.rows for layout in self.branch_layouts)
        )


def cut_group(
    group: PromptGroup | None, options: CutOptions, *, cp_size: int, rows: GroupRows | None = None
) -> GroupCut:
    """Cut `group` (None: nothing but fillers), padded to the sizes of `rows` where they are given."""
    lengths = segment_lengths(len(group.prefix_tokens), options.segment_length) if group is not None else []
    microbatches = split_microbatches(group, options.branches_per_microbatch) if group is not None else []
    rows = rows or GroupRows((1,) * len(lengths), (1,) * len(microbatches))
    lengths += [0] * (len(rows.segment_rows) - len(lengths))
    microbatches += [[]] * (len(rows.microbatch_rows) - len(microbatches))

    def cut(sequences: list[int], min_rows: int) -> SegmentLayout:
        return cut_sequences(
            sequences, cp_size=cp_size, multiple=options.row_multiple, style=options.style, min_rows=min_rows
        )

    return GroupCut(
        tuple(cut([length], size) for length, size in zip(lengths, rows.segment_rows, strict=True)),
        tuple(
            cut([len(group.branches[i]) for i in microbatch] or [0], size)
            for microbatch, size in zip(microbatches, rows.microbatch_rows, strict=True)
        ),
        tuple(tuple(microbatch) for microbatch in microbatches),
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
        num_chunks: int,
        device: torch.device,
        traffic: Traffic,
        moe_layers: tuple[int, ...] = (),
    ):
        self.moe_layers = moe_layers
        self.group = group
        self.traffic = traffic
        self.cp_rank = cp_rank
        self.device = device
        self.prefix_length = len(group.prefix_tokens) if group is not None else 0
        self.segment_layouts = cut.segment_layouts
        self.branch_layouts = cut.branch_layouts
        self.microbatches = cut.microbatches
        lengths = [layout.num_tokens for layout in self.segment_layouts]
        self.starts = [0, *accumulate(lengths)]
        # rows_by_rank[i][r]: what cp rank r holds before segment i
        by_rank = [[0, *accumulate(layout.valid(r) for layout in self.segment_layouts)] for r in range(cut.cp_size)]
        self.rows_by_rank = list(zip(*by_rank, strict=True))
        self.prefix_rows = by_rank[cp_rank]
        self.states = [PrefixState(state_options, num_rows=self.prefix_rows[-1]) for _ in range(num_chunks)]
        self.logprobs: dict[int, Tensor] = {}  # branch -> [R] float32, filled by the last stage

    @property
    def num_segments(self) -> int:
        return len(self.segment_layouts)

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatches)

    def prompt_pass(self, index: int, mode: Mode, chunk: int) -> SegmentPass:
        """The pass of prompt segment `index`: PREFILL or WALK."""
        return self._pass(mode, index, self.starts[index], self.segment_layouts[index], chunk)

    def branch_pass(self, microbatch: int, chunk: int) -> SegmentPass:
        """The pass of a microbatch of branches: every branch starts at the last prompt token's position."""
        layout = self.branch_layouts[microbatch]
        last = self.num_segments
        segment = self._pass(Mode.REPLAY, last, self.prefix_length, layout, chunk)
        segment.routed_experts = self._routed_experts(microbatch)
        return segment

    def prompt_ids(self, index: int) -> Tensor:
        """Input ids of this rank's shard of prompt segment `index`, [1, rows]."""
        layout = self.segment_layouts[index]
        tokens = self.group.prefix_tokens[self.starts[index] : self.starts[index + 1]] if self.group else []
        return self._shard(tokens, layout, PAD_TOKEN)[None]

    def branch_ids(self, microbatch: int) -> Tensor:
        """Input ids of this rank's shard of a microbatch, [1, rows]: [last prompt token] + response[:-1] each."""
        inputs = [self.group.input_tokens(i) for i in self.microbatches[microbatch]]
        return self._shard(_concat(inputs), self.branch_layouts[microbatch], PAD_TOKEN)[None]

    def branch_targets(self, microbatch: int) -> Tensor:
        """Target ids of this rank's shard, [rows]; NO_TARGET for padding."""
        targets = [self.group.target_tokens(i) for i in self.microbatches[microbatch]]
        return self._shard(_concat(targets), self.branch_layouts[microbatch], NO_TARGET)

    def release(self, index: int, chunk: int) -> None:
        """Forget the state that segment `index` and later ones made: its walk is done."""
        self.states[chunk].truncate(num_rows=self.prefix_rows[index], boundary=index)

    def _routed_experts(self, microbatch: int) -> dict[int, Tensor] | None:
        """Router replay: for each MoE layer the experts [rows, top-k] that came with the rollouts, if they did."""
        given = [self.group.branches[i].routed_experts for i in self.microbatches[microbatch]]
        if not given or any(experts is None for experts in given):
            return None
        layout = self.branch_layouts[microbatch]
        index = layout.packed_index(self.cp_rank)
        local = np.zeros((layout.rows, *given[0].shape[1:]), dtype=np.int64)
        local[: len(index)] = np.concatenate(given)[index]
        experts = torch.from_numpy(local).to(self.device)
        return {layer: experts[:, i] for i, layer in enumerate(self.moe_layers)}

    def _shard(self, packed: np.ndarray | list, layout: SegmentLayout, fill: int) -> Tensor:
        """packed [tokens of the segment] -> this rank's rows [rows] on the device."""
        rows = np.full(layout.rows, fill, dtype=np.int64)
        index = layout.packed_index(self.cp_rank)
        rows[: len(index)] = np.asarray(packed, dtype=np.int64)[index]
        return torch.from_numpy(rows).to(self.device)

    def _pass(self, mode, index, start, layout, chunk) -> SegmentPass:
        return SegmentPass(
            mode=mode,
            index=index,
            start=start,
            prefix_rows=self.prefix_rows[index],
            prefix_rows_by_rank=self.rows_by_rank[index],
            traffic=self.traffic,
            layout=layout,
            cp_rank=self.cp_rank,
            state=self.states[chunk],
            positions=positions_of(layout, self.cp_rank, start, self.device),
        )


def _concat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
