"""Microbatches that are prompt groups: what a pipeline's data iterator yields, and how it is cut.

A branch is presented to the pipeline's own loss as the sample `tokens = [last prompt token] + response` with a prompt
of one token: losses take logits from one before the prompt's end, so they work on it unmodified. All R + 1 tokens of a
sample go through the model; the last one's logits are nobody's, so its gradient is zero.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch.distributed as dist

from longstraw_megatron.batch import Branch, PromptGroup
from longstraw_megatron.errors import RefusedError
from longstraw_megatron.layout import SegmentLayout, Style, cut_sequences
from longstraw_megatron.mcore.group_work import CutOptions, GroupCut, GroupRows, cut_group
from longstraw_megatron.mcore.lockstep import merge_rows


@dataclass(frozen=True, eq=False)
class PromptMicrobatch:
    """A prompt group as one microbatch of a pipeline.

    `samples[i]` is the pipeline's own sample of branch i, whatever its forward_step_func takes from its iterator; its
    tokens are [last prompt token] + response (`sample_tokens`). Of the group's branches only the tokens, and routed
    experts where they came along, are used here: rewards and advantages are the pipeline's loss's.
    """

    group: PromptGroup
    samples: tuple[Any, ...]

    def __post_init__(self):
        object.__setattr__(self, "samples", tuple(self.samples))
        if len(self.samples) != self.group.group_size:
            raise RefusedError(
                f"The microbatch of group {self.group.group_id} has {len(self.samples)} samples, wanted one for each "
                f"of its {self.group.group_size} branches; give a sample per branch, in the order of the branches."
            )

    @classmethod
    def from_sequences(
        cls, group_id: str, sequences: Sequence[Sequence[int]], response_lengths: Sequence[int], samples: Iterable[Any]
    ) -> "PromptMicrobatch":
        """From full sequences [prompt + response] that share their prompt.

        Raises:
            RefusedError: their prompts differ.
        """
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        cuts = [len(array) - length for array, length in zip(arrays, response_lengths, strict=True)]
        prompts = [array[:cut] for array, cut in zip(arrays, cuts, strict=True)]
        for i, prompt in enumerate(prompts):
            if not np.array_equal(prompt, prompts[0]):
                raise RefusedError(
                    f"Sequence {i} of group {group_id} has another prompt than sequence 0, wanted one prompt per "
                    "group; group sequences by their prompt tokens."
                )
        branches = tuple(Branch(array[cut:], reward=0.0) for array, cut in zip(arrays, cuts, strict=True))
        return cls(PromptGroup(group_id, prompts[0], branches), tuple(samples))


def sample_tokens(group: PromptGroup, branch: int) -> np.ndarray:
    """[R + 1] int64: the last prompt token and the whole response."""
    return np.concatenate((group.prompt_tokens[-1:], group.branches[branch].tokens))


class PeekedIterator:
    """A caller's iterator with its first item put back; everything else is the caller's own."""

    def __init__(self, iterator: Iterator, first: Any):
        self._iterator = iterator
        self._first = [first]

    def __iter__(self) -> "PeekedIterator":
        return self

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def peek(data_iterator: Any) -> tuple[Any, Any]:
    """(first item or None, iterator to go on with); what is not a Python iterator is left alone."""
    if not hasattr(data_iterator, "__next__"):
        return None, data_iterator
    try:
        first = next(data_iterator)
    except StopIteration:
        return None, data_iterator
    return first, PeekedIterator(data_iterator, first)


def take(data_iterator: Iterator, num_microbatches: int) -> list[PromptMicrobatch]:
    """The next `num_microbatches` items, all of them prompt groups."""
    taken = []
    for i in range(num_microbatches):
        item = next(data_iterator, None)
        if not isinstance(item, PromptMicrobatch):
            raise RefusedError(
                f"Microbatch {i} of {num_microbatches} is a {type(item).__name__}, wanted a PromptMicrobatch like the "
                "first; a step has prompt groups only, or none."
            )
        taken.append(item)
    return taken


def sample_layout(
    length: int, *, padded_length: int, cp_size: int, style: Style, row_multiple: int, min_rows: int = 1
) -> SegmentLayout:
    """A sample of `length` tokens that a pipeline pads at its end to `padded_length` before it cuts it over CP."""
    padded = cut_sequences(
        [padded_length], cp_size=cp_size, multiple=row_multiple, style=style, min_rows=min_rows
    )  # fmt: skip
    runs = tuple(
        tuple(replace(run, length=min(run.stop, length) - run.start) for run in shard if run.start < length)
        for shard in padded.runs
    )
    return SegmentLayout((length,), runs, padded.rows)


@dataclass(frozen=True)
class SampleCut:
    """How prompts and samples are cut; `sample_multiple` is what a pipeline pads a sample's length to a multiple of."""

    segments: CutOptions
    cp_size: int
    sample_multiple: int

    def padded_length(self, length: int) -> int:
        return -(-length // self.sample_multiple) * self.sample_multiple

    def cut(self, group: PromptGroup | None, rows: GroupRows | None = None) -> GroupCut:
        """`cut_group` for a group of `replayed_group`, its branches cut over CP as the pipeline cuts its samples."""
        cut = cut_group(group, self.segments, cp_size=self.cp_size, rows=rows)
        layouts = tuple(
            sample_layout(
                len(group.branches[microbatch[0]]),
                padded_length=self.padded_length(len(group.branches[microbatch[0]])),
                cp_size=self.cp_size,
                style=self.segments.style,
                row_multiple=self.segments.row_multiple,
                min_rows=1 if rows is None else layout.rows,
            )
            if microbatch
            else layout
            for microbatch, layout in zip(cut.microbatches, cut.branch_layouts, strict=True)
        )
        return replace(cut, branch_layouts=layouts)


def replayed_group(group: PromptGroup) -> PromptGroup:
    """The group whose branches have samples for inputs: one token more, so that the inputs take in the whole response.

    The last input's logits are nobody's; where experts came along, it takes those of the input before it.
    """
    branches = []
    for branch in group.branches:
        experts = branch.routed_experts
        if experts is not None and len(experts):
            experts = np.concatenate((experts, experts[-1:]))
        else:
            experts = None
        branches.append(Branch(np.append(branch.tokens, 0), reward=0.0, routed_experts=experts))
    return PromptGroup(group.group_id, group.prompt_tokens, tuple(branches))


def cut_step(
    groups: Sequence[PromptGroup], cut: SampleCut, *, lockstep_group: dist.ProcessGroup | None
) -> list[tuple[PromptGroup | None, GroupCut]]:
    """This rank's groups, cut. Ranks of `lockstep_group` (None: this one alone) share counts and sizes: lockstep.py."""
    cuts = [cut.cut(group) for group in groups]
    if lockstep_group is None:
        return list(zip(groups, cuts, strict=True))
    mine = [group_cut.rows for group_cut in cuts]
    everyone: list[list[GroupRows]] = [mine] * lockstep_group.size()
    dist.all_gather_object(everyone, mine, group=lockstep_group)
    places = [merge_rows([rows for rows in place if rows is not None]) for place in zip_longest(*everyone)]
    padded = [*groups, *[None] * (len(places) - len(groups))]
    return [(group, cut.cut(group, rows)) for group, rows in zip(padded, places, strict=True)]
