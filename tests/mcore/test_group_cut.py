"""Prompt groups cut into segments, microbatches and blocks, and the sizes that ranks in lockstep share."""

import numpy as np
import pytest
import torch
from harness import make_groups, prompt_groups

from longstraw_megatron.comm.counters import Traffic
from longstraw_megatron.mcore.group_work import NO_TARGET, CutOptions, GroupWork, cut_group
from longstraw_megatron.mcore.lockstep import merge_rows
from longstraw_megatron.segments.segment import Mode
from longstraw_megatron.state import StateOptions

OPTIONS = CutOptions(segment_length=4, branches_per_microbatch=2, response_block=5, style="zigzag")


def _lengths(layouts):
    return [layout.lengths for layout in layouts]


def _works(group, cp_size, rows=None):
    cut = cut_group(group, OPTIONS, cp_size=cp_size, rows=rows)
    return [
        GroupWork(
            group,
            cut,
            StateOptions(exact=True),
            cp_rank=cp_rank,
            num_chunks=1,
            device=torch.device("cpu"),
            traffic=Traffic(),
        )
        for cp_rank in range(cp_size)
    ]


def test_branches_longer_than_a_block_are_cut():
    (group,) = prompt_groups(make_groups((7, [3, 12, 5, 10])))
    cut = cut_group(group, OPTIONS, cp_size=1)
    assert _lengths(cut.segment_layouts) == [(4,), (2,)]
    assert cut.microbatches == ((0, 2), (1,), (3,))
    assert [_lengths(layouts) for layouts in cut.block_layouts] == [[], [(5,), (5,)], [(5,)]]
    assert _lengths(cut.branch_layouts) == [(3, 5), (2,), (5,)]


def test_sizes_of_ranks_in_lockstep_hold_every_group_and_fillers_come_before_real_blocks():
    small, large = prompt_groups(make_groups((7, [3, 12]), (3, [11, 2, 16])))
    rows = merge_rows([cut_group(group, OPTIONS, cp_size=1).rows for group in (small, large)])
    assert rows.block_rows == ((5, 5), (5, 5), (5, 5, 5))
    assert (rows.segment_rows, rows.microbatch_rows) == ((4, 2), (3, 2, 1))
    cut = cut_group(small, OPTIONS, cp_size=1, rows=rows)
    assert [_lengths(layouts) for layouts in cut.block_layouts] == [[(0,), (0,)], [(5,), (5,)], [(0,), (0,), (0,)]]
    assert _lengths(cut.branch_layouts) == [(3,), (2,), (0,)]
    assert cut.rows == rows
    none = cut_group(None, OPTIONS, cp_size=1, rows=rows)
    assert none.rows == rows and {layout.num_tokens for layout in none.branch_layouts} == {0}


@pytest.mark.parametrize("cp_size", [1, 3])
def test_blocks_of_all_ranks_are_the_branch(cp_size):
    (group,) = prompt_groups(make_groups((7, [3, 12, 5, 10])))
    for microbatch, blocks in ((1, 3), (2, 2)):
        (branch,) = _works(group, 1)[0].microbatches[microbatch]
        found: dict[int, tuple[int, int]] = {}
        for work in _works(group, cp_size):
            for block in range(blocks):
                if block + 1 < blocks:
                    segment = work.block_pass(work.shape.block_starts[microbatch] + block, Mode.PREFILL, 0)
                else:
                    segment = work.branch_pass(microbatch, 0)
                assert (segment.index, segment.start) == (2 + block, 6 + 5 * block)
                assert sum(segment.prefix_rows_by_rank) == segment.start
                assert segment.prefix_rows == segment.prefix_rows_by_rank[work.cp_rank]
                assert segment.state is work.paths[microbatch, 0] and segment.state.walked
                ids = work.branch_ids(microbatch, block)[0, : segment.valid].tolist()
                targets = work.branch_targets(microbatch, block)
                assert (targets[segment.valid :] == NO_TARGET).all()
                rows = zip(ids, targets[: segment.valid].tolist(), strict=True)
                found |= dict(zip(segment.positions[: segment.valid].tolist(), rows, strict=True))
        tokens = np.concatenate((group.prompt_tokens[-1:], group.branches[branch].tokens)).tolist()
        assert found == {6 + i: pair for i, pair in enumerate(zip(tokens, tokens[1:], strict=False))}


def test_a_branchs_own_state_goes_with_its_first_block():
    (group,) = prompt_groups(make_groups((7, [12])))
    (work,) = _works(group, 1)
    work.states[0].rows("kv", 1).append(torch.ones(6, 2))
    for unit in range(2):
        segment = work.block_pass(unit, Mode.PREFILL, 0)
        segment.state.rows("kv", 1).append(torch.ones(segment.valid, 2))
    assert work.paths[0, 0].rows("kv", 1).num_rows == 6 + 10
    work.release_block(1, 0)
    assert work.paths[0, 0].rows("kv", 1).num_rows == 6 + 5
    work.release_block(0, 0)
    assert not work.paths and work.states[0].rows("kv", 1).num_rows == 6
