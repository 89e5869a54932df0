"""Comparisons: numbers worked by hand, and every way in which two tables can differ."""

import math

import pytest
import torch

from longstraw_megatron.testing import assert_gradients_close, assert_gradients_vanish, compare_tensors, relative_error
from longstraw_megatron.testing.shards import Piece, assemble


def test_relative_error_by_hand():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))
    with pytest.raises(AssertionError, match=r"got \(2,\), wanted \(1,\)"):
        relative_error(torch.ones(2), torch.ones(1))


def test_compare_by_hand():
    want = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0]), "c": None}
    got = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([12.6]), "c": None}
    comparison = compare_tensors(got, want)
    assert (comparison.worst_name, comparison.norm) == ("a", pytest.approx(13.0))
    assert comparison.worst == pytest.approx(0.1)
    assert comparison.overall == pytest.approx(math.hypot(0.5, 0.6) / 13)
    assert [row.name for row in comparison.table] == ["a", "b"]


@pytest.mark.parametrize(
    ("got", "text"),
    [
        ({"a": torch.ones(1)}, r"\['b'\] are missing"),
        ({"a": torch.ones(1), "b": torch.ones(1), "x": None}, r"\['x'\] came besides"),
        ({"a": torch.ones(1), "b": None}, r"one side only: \['b'\]"),
        ({"a": torch.ones(1), "b": torch.ones(2)}, "shapes differ"),
    ],
)
def test_tables_that_do_not_match(got, text):
    with pytest.raises(AssertionError, match=text):
        compare_tensors(got, {"a": torch.ones(1), "b": torch.ones(1)})


def test_nothing_is_not_enough():
    with pytest.raises(AssertionError, match="nothing to compare"):
        compare_tensors({"a": None}, {"a": None})


def test_gradient_bounds_on_both_sides_of_the_limit():
    """|all| = 100 (to 1e-12), |small| = 1e-4: the small tensor may be off by 1e-4 * 1e-4 + 1e-6 * 100 = 1.0001e-4."""
    want = {"large": torch.tensor([100.0], dtype=torch.float64), "small": torch.tensor([1e-4], dtype=torch.float64)}

    def off(large=0.0, small=0.0):
        return {"large": want["large"] + large, "small": want["small"] + small}

    assert_gradients_close(off(small=1.0000e-4), want)
    with pytest.raises(AssertionError, match=r"1 of 2 tensors.*off:\n.*small"):
        assert_gradients_close(off(small=1.0002e-4), want)
    assert_gradients_close(off(large=0.99e-3), want)
    with pytest.raises(AssertionError, match="over all"):  # within the tensor's own 1e-4, beyond 1e-5 of all
        assert_gradients_close(off(large=1.01e-3), want)
    with pytest.raises(AssertionError, match="small"):
        assert_gradients_close(off(small=math.nan), want)


def test_gradients_that_vanish():
    like = {"a": torch.tensor([10.0]), "b": None}
    assert_gradients_vanish({"a": torch.tensor([0.9e-5]), "b": None}, like)
    with pytest.raises(AssertionError, match="wanted at most 1e-06 of 1.00e"):
        assert_gradients_vanish({"a": torch.tensor([1.1e-5]), "b": None}, like)
    with pytest.raises(AssertionError):
        assert_gradients_vanish({"a": torch.tensor([math.nan])}, like)
    with pytest.raises(AssertionError):  # a scale of 0 would let nothing or anything pass
        assert_gradients_vanish({"a": torch.zeros(1)}, {"a": torch.zeros(1)})


def _piece(start: int, *values: float) -> Piece:
    return Piece("w", (4,), (slice(start, start + len(values)),), torch.tensor(values))


def test_assemble_pieces():
    assert assemble([[_piece(0, 1, 2)], [_piece(2, 3, 4)]])["w"].tolist() == [1, 2, 3, 4]
    assert assemble([[_piece(0, 1, 2, 3, 4)], [_piece(2, 3, 4)]])["w"].tolist() == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="rank 1 differs"):
        assemble([[_piece(0, 1, 2, 3, 4)], [_piece(2, 3, 4.001)]], replica_error=1e-5)
    with pytest.raises(AssertionError, match="No rank has a part"):
        assemble([[_piece(0, 1, 2)], [_piece(3, 4)]])
