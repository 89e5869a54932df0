import numpy as np
import pytest

from longstraw_megatron.batch import Branch, PromptGroup, assign_groups, split_microbatches
from longstraw_megatron.errors import NonFiniteError, RefusedError


def _group(lengths, prompt=(7, 8, 9)):
    return PromptGroup("g", list(prompt), [Branch(list(range(10, 10 + n)), 0.0) for n in lengths])


def test_arrays_and_counts():
    branch = Branch([4, 5, 6], 1, loss_mask=[1, 0, True], old_logprobs=[-1, -2.5, -3], routed_experts=[[[0, 1]]] * 3)
    assert branch.tokens.dtype == np.int64 and branch.tokens.tolist() == [4, 5, 6]
    assert branch.old_logprobs.dtype == np.float64 and branch.old_logprobs.tolist() == [-1.0, -2.5, -3.0]
    assert branch.routed_experts.shape == (3, 1, 2) and branch.routed_experts.dtype == np.int64
    assert (len(branch), branch.num_loss_tokens) == (3, 2)
    assert (Branch([4, 5], 0.0).num_loss_tokens, Branch([], 0.0).num_loss_tokens) == (2, 0)


@pytest.mark.parametrize(
    ("prompt", "response", "prefix", "inputs"),
    [
        ([1, 2, 3], [4, 5, 6], [1, 2], [3, 4, 5]),
        ([1, 2, 3], [4], [1, 2], [3]),
        ([1], [4, 5], [], [1, 4]),
        ([1, 2], [], [1], []),
    ],
)
def test_one_token_shift(prompt, response, prefix, inputs):
    group = PromptGroup("g", prompt, [Branch(response, 0.0)])
    assert group.prefix_tokens.tolist() == prefix
    assert group.input_tokens(0).tolist() == inputs
    assert group.target_tokens(0).tolist() == response
    # fed one after the other, prefix and inputs are the whole sequence without the token that nothing predicts from
    assert prefix + inputs == (prompt + response)[: len(prefix) + len(response)]


def test_group_tables():
    group = PromptGroup("g", [1], [Branch([2, 3], 0.0, loss_mask=[0, 1]), Branch([], 0.0), Branch([4], 0.0)])
    assert (group.group_size, group.response_lengths, group.loss_tokens) == (3, (2, 0, 1), (1, 0, 1))


@pytest.mark.parametrize(
    ("exact", "recompute", "cost"), [(True, False, 4 * 2 + 3 * 5), (True, True, 5 * 2 + 4 * 5), (False, False, 2 + 15)]
)
def test_cost_in_token_forwards(exact, recompute, cost):
    got = _group([4, 1]).cost(exact=exact, recompute=recompute)
    assert (got, type(got)) == (cost, int)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1]}, r"loss_mask has 1 entries in a branch of 2 tokens, wanted one entry per token"),
        ({"old_logprobs": [-1.0, -1.0, -1.0]}, r"old_logprobs has 3 entries in a branch of 2 tokens"),
        ({"routed_experts": [[[0, 1]], [[2, 2]]]}, r"routed_experts has one expert twice"),
        ({"routed_experts": [[[0]]]}, r"routed_experts has 1 entries in a branch of 2 tokens"),
        ({"routed_experts": [0, 1]}, r"routed_experts has dtype int64 and shape \[2\], wanted 3-dimensional integers"),
        ({"routed_experts": [[[0]], [[0], [1]]]}, r"routed_experts has rows of different length"),
        ({"ref_logprobs": [None, -1.0]}, r"ref_logprobs has dtype object"),
        ({"rollout_logprobs": ["a", "b"]}, r"rollout_logprobs has dtype <U1"),
        ({"old_logprobs": [-1.0, float("nan")]}, r"old_logprobs is nan at token 1, wanted finite numbers"),
        ({"loss_mask": [1, 2]}, r"loss_mask has the values \[1, 2\], wanted only 0 and 1"),
        ({"loss_mask": [0.5, 1.0]}, r"loss_mask has dtype float64"),
        ({"tokens": [3, -1]}, r"tokens has the entry -1, wanted 0 or more"),
        ({"tokens": [3.5, 1]}, r"tokens has dtype float64"),
        ({"reward": float("inf")}, r"reward is inf, wanted a finite number"),
        ({"reward": None}, r"reward is None, wanted a finite number"),
        ({"advantage": "high"}, r"advantage is 'high', wanted a finite number"),
    ],
)
def test_bad_branches_are_refused(fields, message):
    with pytest.raises(RefusedError, match=message):
        Branch(**({"tokens": [1, 2], "reward": 0.0} | fields))


def test_masked_tokens_may_hold_anything():
    branch = Branch([1, 2], 0.0, loss_mask=[1, 0], old_logprobs=[-1.0, float("nan")])
    assert branch.num_loss_tokens == 1


@pytest.mark.parametrize("prompt", [[], [1, -2]])
def test_bad_prompts_are_refused(prompt):
    with pytest.raises(RefusedError, match="wanted one or more ids from 0 up"):
        _group([1], prompt=prompt)


def test_group_without_branches_is_refused():
    with pytest.raises(RefusedError, match="has no branches"):
        PromptGroup("g", [1], [])


@pytest.mark.parametrize(
    ("costs", "num_ranks", "want"),
    [
        (
            [5, 9, 1, 3, 4],
            2,
            [[1, 3], [0, 4, 2]],
        ),  # 9 | 5 + 4, a tie: 3 goes to the rank with fewer groups, 1 to the other
        ([4, 4, 4, 4], 2, [[0, 2], [1, 3]]),
        ([7], 3, [[0], [], []]),
        ([], 2, [[], []]),
        ([0, 0, 0], 2, [[0, 2], [1]]),
        ([1, 2, 3], 1, [[2, 1, 0]]),
    ],
)
def test_assignment_by_cost(costs, num_ranks, want):
    assert assign_groups(costs, num_ranks) == want


def test_assignment_covers_every_group_and_is_balanced():
    costs = [(37 * i * i + 11 * i) % 101 + 1 for i in range(53)]
    assigned = assign_groups(costs, 8)
    assert sorted(index for groups in assigned for index in groups) == list(range(53))
    loads = [sum(costs[index] for index in groups) for groups in assigned]
    assert max(loads) - min(loads) <= max(costs)  # what longest-first guarantees
    assert all([costs[i] for i in groups] == sorted((costs[i] for i in groups), reverse=True) for groups in assigned)
    assert assign_groups(costs, 8) == assigned


def test_microbatches():
    group = _group([1, 2, 3, 4, 5])
    assert split_microbatches(group, 2) == [[0, 1], [2, 3], [4]]
    assert split_microbatches(group, 9) == [[0, 1, 2, 3, 4]]
    assert split_microbatches(group, 1) == [[0], [1], [2], [3], [4]]
    with pytest.raises(RefusedError, match="branches_per_microbatch is 0, wanted 1 or more"):
        split_microbatches(group, 0)


def test_non_finite_error_names_the_branch():
    error = NonFiniteError("the loss")
    assert str(error) == "NaN or Inf in the loss; the step was stopped before the optimizer."
    assert "in the loss in group g7, branch 3;" in str(error.at("g7", 3))
    assert "in group g7, one of the branches 3, 5 of a microbatch;" in str(error.at("g7", 3, 5))
    assert isinstance(error, ArithmeticError)
