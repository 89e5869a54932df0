"""Policy-gradient objectives of one branch, as d loss / d logprobs.

The loss of a global batch of N groups is a sum over branches, and over the R_i loss tokens of each. With
r_t = exp(logprobs_t - old_logprobs_t) and advantage A, the token's policy loss is

    grpo, dapo, dr_grpo   -min(r_t A, clip(r_t, 1 - low, 1 + high) A)   (arXiv 2402.03300, 2503.14476, 2503.20783)
    gspo                  the same of s = exp(mean_t log r_t)           (arXiv 2507.18071)
    cispo                 -sg[clip(r_t, 1 - low, 1 + high)] A logprobs_t         (arXiv 2506.13585), sg: no gradient

where A < 0, `clip_dual` = c > 1 bounds the first two by -c A (arXiv 1912.09729). Then

    loss_t = w_t * policy_t + kl_coef * kl(logprobs_t, ref_logprobs_t)
    seq-mean-token-mean      1/N sum_groups 1/G sum_i 1/R_i sum_t loss_t
    seq-mean-token-sum-norm  1/N sum_groups 1/G sum_i 1/L   sum_t loss_t, L = `aggregation_norm`
    token-mean               1/(all loss tokens of the global batch) sum loss_t

w_t corrects for the gap between the trainer's old policy and what the inference engine sampled from
(`rollout_weights`). Every denominator is an integer of the global batch and comes in as an argument, so the sum over
branches is the same however they are split into microbatches and ranks, and nothing may average it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw_megatron.errors import NonFiniteError
from longstraw_megatron.functional.kl import kl_estimate
from longstraw_megatron.functional.objective_config import ObjectiveConfig
from longstraw_megatron.functional.objective_stats import Stats, branch_stats, empty_stats


@dataclass(frozen=True)
class Denominators:
    """Integers of the global batch, all ranks together."""

    num_groups: int
    num_branches: int
    num_loss_tokens: int
    max_response_length: int

    @classmethod
    def of(cls, loss_tokens: Sequence[Sequence[int]], response_lengths: Sequence[Sequence[int]]) -> "Denominators":
        """From R_i and the response length of every branch of every group."""
        return cls(
            num_groups=len(loss_tokens),
            num_branches=sum(len(group) for group in loss_tokens),
            num_loss_tokens=sum(sum(group) for group in loss_tokens),
            max_response_length=max((max(group, default=0) for group in response_lengths), default=0),
        )


@dataclass(frozen=True, eq=False)
class BranchLoss:
    """The branch's share of the global loss (scalar, float32 or float64), its gradient [R], and `objective_stats`."""

    loss: Tensor
    grad_logprobs: Tensor
    stats: Stats


def token_denominator(
    num_loss_tokens: int, *, group_size: int, denominators: Denominators, config: ObjectiveConfig
) -> int:
    """What a token's loss is divided by, in a branch with `num_loss_tokens` > 0 of a group of `group_size`."""
    if config.aggregation == "token-mean":
        return denominators.num_loss_tokens
    branches = denominators.num_groups * group_size
    if config.aggregation == "seq-mean-token-mean":
        return branches * num_loss_tokens
    return branches * (config.aggregation_norm or denominators.max_response_length)


def rollout_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """(weights [R], changed [R] bool): importance weights of the old policy against the sampling one.

    w = exp(old - rollout) of each token, or (level `sequence`) exp(sum_t old_t - rollout_t) of the whole branch.
    `tis` (truncated importance sampling, as in verl and slime) clamps w into [low, threshold]; `mis` (masked, also
    called IcePop) sets w to 0 outside. Masked tokens stay in the denominators, which are known before any logprob.
    """
    log_weights = old_logprobs - rollout_logprobs
    if config.rollout_level == "sequence":
        log_weights = log_weights.sum().expand_as(log_weights)
    weights = log_weights.exp()
    low, high = config.rollout_threshold_low, config.rollout_threshold
    if config.rollout_correction == "tis":
        kept = weights.clamp(low, high)
    elif config.rollout_correction == "mis":
        kept = torch.where((weights >= low) & (weights <= high), weights, 0.0)
    else:
        kept = torch.ones_like(weights)
    return kept, (kept != weights) & (config.rollout_correction != "none")


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantage: Tensor, config: ObjectiveConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss [R], ratio [R] without gradient, masks [R] of clipped tokens) of a branch's loss tokens.

    GSPO's ratio is taken as sg[s] exp(logprobs_t - sg[logprobs_t]) (arXiv 2507.18071, section 4.3): the value is s, the
    gradient that of s where tokens share their advantage and weight, and well defined where they do not.
    """
    log_ratio = logprobs - old_logprobs
    if config.name == "gspo":
        log_ratio = log_ratio.detach().mean() + logprobs - logprobs.detach()
    ratio = log_ratio.exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    value = ratio.detach()
    nowhere = torch.zeros_like(value, dtype=torch.bool)
    if config.name == "cispo":
        clipped = {"clipped_low": value < low, "clipped_high": value > high, "clipped_dual": nowhere}
        return -value.clamp(low, high) * advantage * logprobs, value, clipped
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    dual = nowhere
    if config.clip_dual is not None:
        bound = config.clip_dual * advantage
        dual = (advantage < 0) & (gain.detach() < bound)
        gain = torch.where(dual, bound, gain)
    clipped = {
        "clipped_low": (value < low) & (advantage < 0),
        "clipped_high": (value > high) & (advantage > 0),
        "clipped_dual": dual,
    }
    return -gain, value, clipped


def _loss_tokens(tensor: Tensor | None, keep: Tensor, like: Tensor, name: str) -> Tensor | None:
    """The entries that are in the loss, on the device and in the dtype of `like`."""
    if tensor is None:
        return None
    if tensor.shape != keep.shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted {list(keep.shape)} as the logprobs.")
    kept = tensor.detach().to(device=like.device)[keep].to(like.dtype)
    if not kept.isfinite().all():
        raise NonFiniteError(name)
    return kept


def branch_objective(
    logprobs: Tensor,
    *,
    advantage: float | Tensor,
    group_size: int,
    denominators: Denominators,
    config: ObjectiveConfig,
    loss_mask: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> BranchLoss:
    """A whole branch's share of the global loss and its gradient by `logprobs` [R].

    Tensors are [R], `advantage` one number or [R]; loss_mask is 1 in the loss, and what stands elsewhere is not
    looked at, except in `logprobs`. `group_size` is G of the branch's group, masked branches included; a branch
    without loss tokens gives 0. Absent `old_logprobs` are `logprobs` without gradient: ratio 1. The arithmetic is
    float32, or float64 where `logprobs` is; the gradient has the dtype of `logprobs`.

    Raises NonFiniteError for NaN or Inf in an input, the loss or the gradient (the caller names the branch),
    RefusedError where the configuration needs logprobs that are absent, and ValueError for shapes that differ.
    """
    if not logprobs.isfinite().all():
        raise NonFiniteError("logprobs")
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    keep = torch.ones_like(logprobs, dtype=torch.bool)
    if loss_mask is not None:
        if loss_mask.shape != logprobs.shape:
            raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, wanted {list(logprobs.shape)}.")
        keep = loss_mask.to(device=logprobs.device, dtype=torch.bool)
    leaf = logprobs.detach()[keep].to(dtype).requires_grad_()
    if not len(leaf):
        stats = empty_stats(logprobs.device)
        stats["num_branches"] += 1
        return BranchLoss(leaf.detach().sum(), torch.zeros_like(logprobs), stats)

    old = _loss_tokens(old_logprobs, keep, leaf, "old_logprobs")
    old = leaf.detach() if old is None else old
    ref = _loss_tokens(ref_logprobs, keep, leaf, "ref_logprobs")
    rollout = _loss_tokens(rollout_logprobs, keep, leaf, "rollout_logprobs")
    advantage = torch.as_tensor(advantage, dtype=dtype, device=leaf.device).expand_as(logprobs)
    advantage = _loss_tokens(advantage, keep, leaf, "the advantage")
    config.check_given(ref_logprobs=ref, rollout_logprobs=rollout)

    scale = 1 / token_denominator(len(leaf), group_size=group_size, denominators=denominators, config=config)
    weights, changed = (None, None) if rollout is None else rollout_weights(old, rollout, config)
    with torch.enable_grad():
        policy, ratio, clipped = policy_loss(leaf, old, advantage, config)
        policy_total = (policy if weights is None else policy * weights).sum() * scale
        ref_kl = None if ref is None else kl_estimate(leaf, ref, config.kl_type)
        kl_total = leaf.new_zeros(()) if config.kl_coef == 0 else ref_kl.sum() * (config.kl_coef * scale)
        loss = policy_total + kl_total
        (grad,) = torch.autograd.grad(loss, leaf)
    if not loss.isfinite():
        raise NonFiniteError("the loss")
    if not grad.isfinite().all():
        raise NonFiniteError("the gradient of the loss")
    grad_logprobs = torch.zeros_like(logprobs, dtype=dtype)
    grad_logprobs[keep] = grad

    sums = {"loss": loss, "policy_loss": policy_total, "kl_loss": kl_total, "ratio": ratio, **clipped}
    if ref is not None:
        sums["ref_kl"] = ref_kl
    if rollout is not None:
        sums |= {"rollout_weight": weights, "rollout_changed": changed}
    stats = branch_stats(leaf.detach(), old, rollout, {name: tensor.detach() for name, tensor in sums.items()})
    return BranchLoss(loss.detach(), grad_logprobs.to(logprobs.dtype), stats)
