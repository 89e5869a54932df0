"""Stable top-k against Python's sort by (-score, position), whatever the blocks and their order."""

import pytest
import torch

from longstraw_megatron.functional.topk import (
    empty_topk,
    index_scores,
    make_candidates,
    merge_topk,
    topk_positions,
    topk_scores,
)


def literal_topk(scores, positions, k, visible=None):
    """For each query the positions of its k best keys, by the definition; -1 behind them."""
    rows = []
    for t, row in enumerate(scores.tolist()):
        keys = [i for i in range(len(row)) if visible is None or visible[t, i]]
        best = sorted(keys, key=lambda i: (-row[i], positions[i]))[:k]
        rows.append([positions[i] for i in best] + [-1] * (k - len(best)))
    return torch.tensor(rows, dtype=torch.int32)


def tied_scores(num_queries, num_keys, seed=0):
    """Scores of which about two thirds are 0, of both signs, and the rest takes few values."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, 5, (num_queries, num_keys), generator=generator).clamp_max(1).float() * 0.5
    signs = torch.randint(0, 2, scores.shape, generator=generator).float() * 2 - 1
    return torch.where(scores <= 0, 0.0 * signs, scores * signs)


def running_topk(scores, positions, k, blocks, visible=None):
    best = empty_topk(scores.shape[0], k)
    for block in blocks:
        seen = None if visible is None else visible[:, block]
        best = merge_topk(best, make_candidates(scores[:, block], positions[block], seen))
    return best


@pytest.mark.parametrize("k", [1, 5, 16, 300])
@pytest.mark.parametrize("block_length", [1, 7, 64, 200])
def test_ties_go_to_the_lowest_position(k, block_length):
    scores = tied_scores(6, 200)
    positions = torch.arange(1000, 1200)
    blocks = list(torch.arange(200).split(block_length))
    want = literal_topk(scores, positions.tolist(), k)
    for seed in range(3):
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed)).tolist()
        best = running_topk(scores, positions, k, [blocks[i] for i in order])
        assert torch.equal(topk_positions(best), want)


def test_keys_in_any_order_inside_a_block():
    scores = tied_scores(5, 120, seed=1)
    positions = torch.arange(120)
    want = topk_positions(running_topk(scores, positions, 20, [torch.arange(120)]))
    shuffle = torch.randperm(120, generator=torch.Generator().manual_seed(3))
    assert torch.equal(topk_positions(running_topk(scores, positions, 20, list(shuffle.split(50)))), want)


def test_plain_topk_breaks_the_ties_of_this_test_data():
    """The data would not notice an unstable top-k otherwise."""
    scores = tied_scores(6, 200)
    plain = scores.topk(16, dim=1).indices.to(torch.int32)
    stable = topk_positions(running_topk(scores, torch.arange(200), 16, [torch.arange(200)]))
    assert not torch.equal(plain.sort(1).values, stable.sort(1).values)


def test_all_scores_zero_selects_the_first_positions():
    positions = torch.tensor([7, 3, 9, 1, 2**31 - 1])
    best = running_topk(torch.zeros(1, 5), positions, 4, [torch.tensor([4, 0]), torch.tensor([2, 1, 3])])
    assert topk_positions(best).tolist() == [[1, 3, 7, 9]]


def test_negative_and_extreme_scores_keep_their_order():
    tiny = torch.finfo(torch.float32).tiny / 2  # subnormal
    values = [-float("inf"), -3e38, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, 3e38, float("inf")]
    best = running_topk(torch.tensor([values]), torch.arange(10), 10, [torch.arange(10)])
    assert topk_positions(best).tolist() == [[9, 8, 7, 6, 4, 5, 3, 2, 1, 0]]
    want = torch.tensor([[float("inf"), 3e38, 1.0, tiny, 0.0, 0.0, -tiny, -1.0, -3e38, -float("inf")]])
    assert torch.equal(topk_scores(best), want)


def test_invisible_keys_are_never_selected():
    scores = tied_scores(4, 30, seed=2) - 100  # all below zero: "none" must still be lower
    visible = torch.rand(4, 30, generator=torch.Generator().manual_seed(0)) < 0.3
    visible[3] = False
    positions = torch.arange(30)
    best = running_topk(scores, positions, 12, list(torch.arange(30).split(11)), visible)
    assert torch.equal(topk_positions(best), literal_topk(scores, positions.tolist(), 12, visible))
    assert topk_positions(best)[3].tolist() == [-1] * 12
    assert torch.isneginf(topk_scores(best)[3]).all()


def test_positions_may_differ_by_query():
    scores = torch.zeros(2, 3)
    positions = torch.tensor([[5, 4, 6], [0, 9, 8]])
    best = merge_topk(empty_topk(2, 2), make_candidates(scores, positions))
    assert topk_positions(best).tolist() == [[4, 5], [0, 8]]


def test_no_keys_at_all():
    best = merge_topk(empty_topk(3, 4), make_candidates(torch.zeros(3, 0), torch.zeros(0)))
    assert topk_positions(best).tolist() == [[-1] * 4] * 3


def test_index_scores():
    generator = torch.Generator().manual_seed(0)
    q, w, key = (torch.randn(*shape, generator=generator) for shape in ((3, 4, 8), (3, 4), (5, 8)))
    want = sum(w[:, n, None].double() * (q[:, n].double() @ key.T.double()).clamp_min(0) for n in range(4))
    got = index_scores(q, w, key)
    assert got.dtype == torch.float32
    assert (got - want).norm() <= 1e-6 * want.norm()
    half = index_scores(q.bfloat16(), w.bfloat16(), key.bfloat16())
    same = index_scores(q.bfloat16().float(), w.bfloat16().float(), key.bfloat16().float())
    assert half.dtype == torch.float32
    assert torch.equal(half, same)
