"""Per-token estimators of a KL divergence from samples (Schulman, "Approximating KL Divergence", 2020).

With x drawn from p and r = q(x) / p(x), KL[p, q] is the mean of

    k1 = -log r          unbiased, of high variance and either sign
    k2 = (log r)^2 / 2   biased, of low variance
    k3 = r - 1 - log r   unbiased, never negative; the one in GRPO (arXiv 2402.03300, eq. 4)

As a loss, the gradient of k1 is 0 in the mean, and that of k2 is the gradient of KL[p, q].
"""

from typing import Literal

import torch
from torch import Tensor

KLType = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_p: Tensor, logprobs_q: Tensor, kind: KLType) -> Tensor:
    """The estimate of KL[p, q] at each token, shaped as its inputs: logprobs of tokens that were drawn from p."""
    log_ratio = logprobs_q - logprobs_p
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"kl_estimate needs k1, k2 or k3, got {kind!r}.")
