"""Where tokens lie, against literal lists for every rank."""

import pytest
import torch

from longstraw_megatron.layout import cut_sequences
from longstraw_megatron.segments.token_map import Stretch, TokenMap, make_token_maps, own_stretches, prefix_stretches
from longstraw_megatron.state import PrefixState, StateOptions


def tokens(*values):
    return torch.tensor(values, dtype=torch.int32)


def two_zigzag_segments():
    """Positions 0-7 and 8-12 over two ranks: rank 0 holds 0 1 6 7 | 8 9, rank 1 holds 2 3 4 5 | 10 11 12."""
    layouts = [cut_sequences((length,), cp_size=2, style="zigzag") for length in (8, 5)]
    return [(0, layouts[0]), (8, layouts[1])]


def test_prefix_of_two_zigzag_segments():
    prefix = TokenMap(prefix_stretches(two_zigzag_segments()), cp_size=2)
    assert prefix.num_tokens == 13 and prefix.rows_by_rank == (6, 7)
    assert prefix.tokens_of(0).tolist() == [0, 1, 6, 7, 8, 9]
    assert prefix.tokens_of(1).tolist() == [2, 3, 4, 5, 10, 11, 12]
    asked = tokens(7, 0, -1, 12, 9, 4)
    assert prefix.local_rows(asked, 0).tolist() == [3, 0, -1, -1, 5, -1]
    assert prefix.local_rows(asked, 1).tolist() == [-1, -1, -1, 6, -1, 2]
    assert prefix.flat_rows(asked, 100).tolist() == [3, 0, -1, 106, 5, 102]
    assert prefix.local_rows(asked.view(2, 3), 0).tolist() == [[3, 0, -1], [-1, 5, -1]]


def test_every_token_is_in_one_row_whatever_the_cut():
    for cp_size in (1, 2, 3, 5):
        for style in ("contiguous", "zigzag"):
            layouts = [cut_sequences((n,), cp_size=cp_size, style=style, multiple=4) for n in (7, 1, 0, 12, 2)]
            starts = [0, 7, 8, 8, 20]
            prefix = TokenMap(prefix_stretches(zip(starts, layouts, strict=True)), cp_size=cp_size)
            everything = torch.arange(22, dtype=torch.int32)
            rows = torch.stack([prefix.local_rows(everything, rank) for rank in range(cp_size)])
            assert ((rows >= 0).sum(0) == 1).all()
            for rank in range(cp_size):
                held = prefix.tokens_of(rank)
                assert rows[rank][held.long()].tolist() == list(range(len(held)))
                assert len(held) == sum(layout.valid(rank) for layout in layouts)
            most = max(prefix.rows_by_rank)
            assert torch.equal(prefix.flat_rows(everything, most), torch.where(
                rows >= 0, rows + most * torch.arange(cp_size)[:, None], -1
            ).amax(0))  # fmt: skip


def test_one_rank_is_one_stretch():
    layouts = [cut_sequences((n,)) for n in (5, 3, 9)]
    prefix = TokenMap(prefix_stretches(zip((0, 5, 8), layouts, strict=True)), cp_size=1)
    assert prefix.stretches == [Stretch(0, 17, 0, 0)]
    assert prefix.local_rows(tokens(16, -1, 0), 0).tolist() == [16, -1, 0]


def test_own_tokens_of_packed_branches():
    """Branches of 3 and 4 tokens over two ranks, each cut by itself: packed order is 0-2, 3-6."""
    own = TokenMap(own_stretches(cut_sequences((3, 4), cp_size=2)), cp_size=2)
    assert own.tokens_of(0).tolist() == [0, 1, 3, 4]
    assert own.tokens_of(1).tolist() == [2, 5, 6]
    assert own.local_rows(tokens(4, 2, 6, 3), 1).tolist() == [-1, 0, 2, -1]


def test_nothing():
    maps = make_token_maps([], cut_sequences((0,), cp_size=2), "cpu")
    for table in (maps.prefix, maps.own):
        assert table.num_tokens == 0 and table.rows_by_rank == (0, 0)
        assert table.local_rows(tokens(-1, -1), 1).tolist() == [-1, -1]
        assert table.flat_rows(tokens(-1), 4).tolist() == [-1]
        assert table.tokens_of(0).shape == (0,)


def test_gaps_and_packed_prefixes_are_refused():
    with pytest.raises(ValueError, match="no gaps"):
        TokenMap([Stretch(0, 4, 0, 0), Stretch(5, 1, 0, 4)], cp_size=1)
    with pytest.raises(ValueError, match="one sequence, and a segment of it has 2"):
        prefix_stretches([(0, cut_sequences((2, 2)))])


def test_state_knows_the_layouts_of_its_path():
    layouts = [cut_sequences((n,)) for n in (5, 3, 2)]
    state = PrefixState(StateOptions(exact=True))
    state.layouts[1], state.layouts[0] = (5, layouts[1]), (0, layouts[0])
    fork = state.fork()
    fork.layouts[2] = (8, layouts[2])
    assert fork.layouts_before(3) == [(0, layouts[0]), (5, layouts[1]), (8, layouts[2])]
    assert fork.layouts_before(2) == state.layouts_before(9) == [(0, layouts[0]), (5, layouts[1])]
    fork.truncate(num_rows=8, boundary=2)
    assert fork.layouts_before(3) == state.layouts_before(3)
    state.truncate(num_rows=5, boundary=1)
    assert state.layouts_before(3) == [(0, layouts[0])]


def test_gathered_rows_lie_in_one_page():
    state = PrefixState(StateOptions(exact=True, page_length=4), num_rows=11)
    for kind in ("latent", "index_key"):
        for length in (3, 8):
            state.rows(kind, 1).append(torch.ones(length, 2))
    assert [(page.start, page.stop) for page in state.rows("latent", 1).pages(11)] == [(0, 11)]
    assert [(page.start, page.stop) for page in state.rows("index_key", 1).pages(11)] == [(0, 4), (4, 8), (8, 11)]
