import pytest
import torch

from longstraw_megatron.functional.advantages import group_advantages


def test_advantages_by_hand():
    # mean 2, unbiased variance ((-2)^2 + 0 + 2^2) / 2 = 4
    got = group_advantages([0.0, 2.0, 4.0])
    torch.testing.assert_close(
        got, torch.tensor([-2.0, 0.0, 2.0], dtype=torch.float64) / (2 + 1e-6), rtol=1e-15, atol=0
    )


def test_dr_grpo_only_centers():
    assert group_advantages([1.0, 0.0, 0.0, 0.0], divide_by_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[1.0], [0.1, 0.1, 0.1], [-3.7] * 7])
@pytest.mark.parametrize("divide_by_std", [True, False])
def test_equal_rewards_are_exactly_zero(rewards, divide_by_std):
    # (0.1 + 0.1 + 0.1) / 3 is not 0.1, so that a formula alone would not give 0
    assert group_advantages(rewards, divide_by_std=divide_by_std).tolist() == [0.0] * len(rewards)


def test_given_advantages_win():
    assert group_advantages([1.0, 0.0], [0.25, -3.0]).tolist() == [0.25, -3.0]
    assert group_advantages([1.0], [2.5]).tolist() == [2.5]
    assert group_advantages([1.0, 0.0], [None, None]).tolist() == group_advantages([1.0, 0.0]).tolist()


@pytest.mark.parametrize("given", [[0.5, None], [None, 0.5], [0.5]])
def test_some_given_are_refused(given):
    with pytest.raises(ValueError, match=r"1 of 2 branches of a group have an advantage, wanted all or none"):
        group_advantages([1.0, 0.0], given)
