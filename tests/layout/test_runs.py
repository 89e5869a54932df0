"""Token ownership, as literal lists for every rank."""

import itertools

import pytest

from longstraw_megatron.layout import Run, SegmentLayout, cut_sequences


def tokens_of(layout):
    """For each rank, its rows as 'sequence.token', '-' for padding."""
    shards = []
    for runs in layout.runs:
        rows = [f"{run.sequence}.{token}" for run in runs for token in range(run.start, run.stop)]
        shards.append(" ".join(rows + ["-"] * (layout.rows - len(rows))))
    return shards


LITERAL = {
    "one rank": ({"lengths": [3]}, ["0.0 0.1 0.2"]),
    "one rank, zigzag": ({"lengths": [3], "style": "zigzag"}, ["0.0 0.1 0.2"]),
    "contiguous": ({"lengths": [7], "cp_size": 3}, ["0.0 0.1 0.2", "0.3 0.4 0.5", "0.6 - -"]),
    "zigzag": (
        {"lengths": [8], "cp_size": 2, "style": "zigzag"},
        ["0.0 0.1 0.6 0.7", "0.2 0.3 0.4 0.5"],
    ),
    "zigzag, not a multiple": (
        {"lengths": [7], "cp_size": 2, "style": "zigzag"},
        ["0.0 0.1 0.6 -", "0.2 0.3 0.4 0.5"],
    ),
    "zigzag, three ranks": (
        {"lengths": [12], "cp_size": 3, "style": "zigzag"},
        ["0.0 0.1 0.10 0.11", "0.2 0.3 0.8 0.9", "0.4 0.5 0.6 0.7"],
    ),
    "more ranks than tokens": ({"lengths": [2], "cp_size": 4}, ["0.0", "0.1", "-", "-"]),
    "more pieces than tokens": (
        {"lengths": [5], "cp_size": 4, "style": "zigzag"},
        ["0.0 -", "0.1 -", "0.2 -", "0.3 0.4"],
    ),
    "several sequences": (
        {"lengths": [4, 1, 3], "cp_size": 2},
        ["0.0 0.1 1.0 2.0 2.1", "0.2 0.3 2.2 - -"],
    ),
    "several sequences, zigzag": (
        {"lengths": [4, 1, 3], "cp_size": 2, "style": "zigzag"},
        ["0.0 0.3 1.0 2.0", "0.1 0.2 2.1 2.2"],
    ),
    "multiple": ({"lengths": [5], "cp_size": 2, "multiple": 4}, ["0.0 0.1 0.2 -", "0.3 0.4 - -"]),
    "min_rows": ({"lengths": [2], "cp_size": 2, "multiple": 2, "min_rows": 3}, ["0.0 - - -", "0.1 - - -"]),
    "empty sequence": ({"lengths": [0, 2], "cp_size": 2}, ["1.0", "1.1"]),
    "no token": ({"lengths": [0], "cp_size": 2, "multiple": 2}, ["- -", "- -"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LITERAL)
def test_shards(case):
    arguments, shards = LITERAL[case]
    assert tokens_of(cut_sequences(**arguments)) == shards


def test_neighbouring_pieces_are_one_run():
    layout = cut_sequences([8], cp_size=2, style="zigzag")
    assert layout.runs == ((Run(0, 0, 2, 0), Run(0, 6, 2, 2)), (Run(0, 2, 4, 0),))
    assert layout.runs[0][1].rows == slice(2, 4)


def test_indices():
    layout = cut_sequences([4, 3], cp_size=2, style="zigzag", multiple=5)
    assert tokens_of(layout) == ["0.0 0.3 1.0 - -", "0.1 0.2 1.1 1.2 -"]
    assert layout.sequence_starts == (0, 4)
    assert [layout.valid(cp_rank) for cp_rank in range(2)] == [3, 4]
    assert [layout.packed_index(cp_rank) for cp_rank in range(2)] == [[0, 3, 4], [1, 2, 5, 6]]
    assert [layout.token_offsets(cp_rank) for cp_rank in range(2)] == [[0, 3, 0, 0, 0], [1, 2, 1, 2, 0]]
    assert layout.gather_index() == [0, 5, 6, 1, 2, 7, 8]


@pytest.mark.parametrize("style", ["contiguous", "zigzag"])
def test_every_token_has_one_owner(style):
    for lengths, cp_size, multiple in itertools.product(([1], [13], [5, 0, 1, 9]), (1, 2, 3, 4, 8), (1, 2, 4)):
        layout = cut_sequences(lengths, cp_size=cp_size, multiple=multiple, style=style)
        owned = sorted(token for cp_rank in range(cp_size) for token in layout.packed_index(cp_rank))
        assert owned == list(range(sum(lengths)))
        assert layout.rows % multiple == 0 and layout.rows >= 1

        for token, row in enumerate(layout.gather_index()):
            cp_rank, local = divmod(row, layout.rows)
            assert layout.packed_index(cp_rank)[local] == token


def test_trivial_layout():
    assert cut_sequences([4]).is_trivial
    assert not cut_sequences([4], multiple=8).is_trivial
    assert not cut_sequences([2, 2]).is_trivial
    assert not cut_sequences([4], cp_size=2).is_trivial


def test_zigzag_balances_causal_pairs():
    """Each rank's tokens see equally many keys, in a sequence that divides."""

    def pairs(layout: SegmentLayout) -> list[int]:
        return [sum(token + 1 for run in runs for token in range(run.start, run.stop)) for runs in layout.runs]

    assert pairs(cut_sequences([64], cp_size=4, style="zigzag")) == [520, 520, 520, 520]
    assert pairs(cut_sequences([64], cp_size=4)) == [136, 392, 648, 904]


@pytest.mark.parametrize("bad", [{"lengths": [-1]}, {"lengths": [1], "cp_size": 0}, {"lengths": [1], "multiple": 0}])
def test_bad_arguments_are_refused(bad):
    with pytest.raises(ValueError, match="cut_sequences needs"):
        cut_sequences(**bad)
