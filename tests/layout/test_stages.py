"""Layers of pipeline stages, with and without legal starts."""

import pytest

from longstraw_megatron.layout.stages import split_layers, stage_starts

GLM = [0, 1, 2, *range(6, 78, 4)]  # layers of GLM-5.2 that compute their own top-k


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "starts", "sizes"),
    [
        (8, 2, range(8), [4, 4]),
        (8, 3, range(8), [2, 3, 3]),
        (5, 4, range(5), [1, 1, 1, 2]),
        (1, 1, [0], [1]),
        (78, 4, GLM, [18, 20, 20, 20]),
        (11, 2, [0, 1, 2, 6, 10], [6, 5]),
        (11, 4, [0, 1, 2, 6, 10], [2, 4, 4, 1]),
    ],
)
def test_split_is_even_and_legal(num_layers, num_stages, starts, sizes):
    got = split_layers(num_layers, num_stages, list(starts))
    assert max(got) == max(sizes) and sum(got) == num_layers and len(got) == num_stages
    assert set(stage_starts(got)) <= set(starts)
    if num_layers != 11:
        assert got == sizes


def test_no_split_without_enough_starts():
    assert split_layers(11, 6, [0, 1, 2, 6, 10]) is None
    assert split_layers(2, 3, [0, 1]) is None
