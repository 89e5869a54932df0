"""Advantages of one prompt group: how much better each response is than its siblings.

GRPO (arXiv 2402.03300): A_i = (r_i - mean) / (std + eps), unbiased std. Dr. GRPO (arXiv 2503.20783) leaves the
division out, because it makes groups that are nearly always right or wrong count more.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def group_advantages(
    rewards: Sequence[float],
    given: Sequence[float | None] | None = None,
    *,
    divide_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Advantages [G] float64 of a group with rewards [G].

    `given` advantages, one per branch, are taken as they are; all of a group or none. Equal rewards, and so a group
    of one, have advantage exactly 0. Raises ValueError where only some of a group are given.
    """
    given = [None] * len(rewards) if given is None else list(given)
    missing = sum(advantage is None for advantage in given)
    if len(given) != len(rewards) or 0 < missing < len(given):
        raise ValueError(
            f"{len(given) - missing} of {len(rewards)} branches of a group have an advantage, wanted all or none; "
            "give every branch one, or leave them all to the rewards."
        )
    if missing == 0:
        return torch.tensor(given, dtype=torch.float64)
    values = torch.tensor(rewards, dtype=torch.float64)
    if bool((values == values[0]).all()):
        return torch.zeros_like(values)
    centered = values - values.mean()
    return centered / (values.std(unbiased=True) + eps) if divide_by_std else centered
