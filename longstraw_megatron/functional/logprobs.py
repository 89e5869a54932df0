"""Log-probabilities of given tokens, dense: the reference of `segments/logprobs.py`.

logprobs[t] = logits[t, target[t]] - log sum_v exp(logits[t, v]),   logits = hidden weight^T / temperature
"""

import torch
from torch import Tensor


def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Logprobs [T] of `targets` [T] int64 under hidden [T, D] and output weight [V, D].

    float32, or float64 where a factor is. A target of -1 is padding: its logprob is 0 and passes no gradient.
    """
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    logits = hidden.to(dtype) @ weight.to(dtype).T / temperature
    chosen = logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    return torch.where(targets >= 0, chosen - logits.logsumexp(dim=1), 0.0)
