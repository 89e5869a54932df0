"""The causal mask as blocks, against the mask written out row by row."""

import itertools

import pytest
import torch

from longstraw_megatron.layout import Run, cut_sequences
from longstraw_megatron.layout.blocks import Block, attention_blocks


def mask_of(blocks, num_queries, num_keys):
    """How often each (query, key) pair is attended."""
    counts = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for block in blocks:
        part = counts[block.query_rows, block.key_rows]
        part += torch.ones_like(part).tril() if block.causal else torch.ones_like(part)
    return counts


def wanted_mask(query_runs, key_runs, num_rows):
    mask = torch.zeros(num_rows, num_rows, dtype=torch.int64)
    for query, key in itertools.product(query_runs, key_runs):
        if query.sequence == key.sequence:
            for i, j in itertools.product(range(query.length), range(key.length)):
                mask[query.offset + i, key.offset + j] = key.start + j <= query.start + i
    return mask


@pytest.mark.parametrize("style", ["contiguous", "zigzag"])
@pytest.mark.parametrize("lengths", [[1], [16], [13], [6, 1, 9], [3, 0, 2]])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_blocks_are_the_mask(cp_size, lengths, style):
    layout = cut_sequences(lengths, cp_size=cp_size, style=style)
    for query_runs, key_runs in itertools.product(layout.runs, layout.runs):
        blocks = attention_blocks(query_runs, key_runs)
        got = mask_of(blocks, layout.rows, layout.rows)
        assert torch.equal(got, wanted_mask(query_runs, key_runs, layout.rows))
        assert sum(block.num_pairs for block in blocks) == got.sum()


def test_what_is_seen_whole_is_one_block():
    zigzag = cut_sequences([16], cp_size=2, style="zigzag")
    first, second = zigzag.runs  # tokens 0-3 and 12-15; tokens 4-11
    assert attention_blocks(second, first) == [Block(slice(0, 8), slice(0, 4), causal=False)]
    assert attention_blocks(first, second) == [Block(slice(4, 8), slice(0, 8), causal=False)]
    assert attention_blocks(first, first) == [
        Block(slice(0, 4), slice(0, 4), causal=True),
        Block(slice(4, 8), slice(4, 8), causal=True),
        Block(slice(4, 8), slice(0, 4), causal=False),
    ]
    earlier, *_, later = cut_sequences([16], cp_size=4).runs
    assert attention_blocks(later, earlier) == [Block(slice(0, 4), slice(0, 4), causal=False)]
    assert attention_blocks(earlier, later) == []


def test_sequences_do_not_see_each_other():
    (runs,) = cut_sequences([2, 3]).runs
    assert attention_blocks(runs, runs) == [
        Block(slice(0, 2), slice(0, 2), causal=True),
        Block(slice(2, 5), slice(2, 5), causal=True),
    ]


def test_overlapping_runs_are_refused():
    with pytest.raises(ValueError, match="equal or disjoint"):
        attention_blocks((Run(0, 0, 4, 0),), (Run(0, 2, 4, 0),))
