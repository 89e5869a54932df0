"""Which rank runs which groups, and in what sizes.

Whole groups go to data-parallel ranks. Where an expert group spans them, every MoE layer is a collective across those
ranks: they then run the same actions on shards of equal size, and a rank with less to do runs tokens that are not
valid, backward included.
"""

from collections.abc import Sequence
from itertools import zip_longest

from longstraw_megatron.batch import PromptGroup, assign_groups
from longstraw_megatron.mcore.group_work import CutOptions, GroupRows, cut_group


def merge_rows(rows: Sequence[GroupRows]) -> GroupRows:
    """Sizes that hold every group of `rows`: the most segments, microbatches and blocks, each with the most rows.

    Blocks are counted from a microbatch's last one, so that this is a real one wherever any is.
    """

    def merge_blocks(blocks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        backwards = zip_longest(*(reversed(sizes) for sizes in blocks), fillvalue=0)
        return tuple(map(max, backwards))[::-1]

    return GroupRows(
        tuple(max(sizes) for sizes in zip_longest(*(r.segment_rows for r in rows), fillvalue=0)),
        tuple(max(sizes) for sizes in zip_longest(*(r.microbatch_rows for r in rows), fillvalue=0)),
        tuple(map(merge_blocks, zip_longest(*(r.block_rows for r in rows), fillvalue=()))),
    )


def assign_step(
    groups: Sequence[PromptGroup],
    *,
    dp_size: int,
    cut: CutOptions,
    cp_size: int,
    exact: bool,
    recompute: bool,
    lockstep: bool,
) -> list[list[tuple[int | None, GroupRows]]]:
    """For each data-parallel rank, its groups (index in `groups`, None for a filler) and their padded sizes."""
    costs = [group.cost(exact=exact, recompute=recompute) for group in groups]
    assigned = assign_groups(costs, dp_size)
    rows = {index: cut_group(group, cut, cp_size=cp_size).rows for index, group in enumerate(groups)}
    if not lockstep:
        return [[(index, rows[index]) for index in indices] for indices in assigned]
    result: list[list[tuple[int | None, GroupRows]]] = [[] for _ in range(dp_size)]
    for place in zip_longest(*assigned, fillvalue=None):
        shared = merge_rows([rows[index] for index in place if index is not None])
        for dp_rank, index in enumerate(place):
            result[dp_rank].append((index, shared))
    return result
