"""A global batch of ragged branches, and its loss written token by token in one expression per aggregation."""

import math

import torch

from longstraw_megatron.functional.objective import Denominators, branch_objective

F64 = torch.float64
LENGTHS = [[5, 1, 8], [3, 7]]
MASKS = {0: {0: [1, 0, 0, 1, 1]}, 1: {1: [0, 1, 1, 1, 1, 1, 0]}}
NAMES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo"]


class Batch:
    """Groups of ragged branches; `logprobs[g][i]` are leaves, the other fields plain tensors or None."""

    def __init__(self, lengths, *, seed=0, masks=None, spread=0.4, dtype=F64):
        generator = torch.Generator().manual_seed(seed)

        def draw(length, scale):
            return scale * torch.randn(length, generator=generator, dtype=F64)

        self.logprobs, self.old, self.ref, self.rollout, self.masks, self.advantages = [], [], [], [], [], []
        for g, group in enumerate(lengths):
            current = [-1 - draw(n, 0.5).abs() for n in group]
            self.logprobs.append([lp.to(dtype, copy=True).requires_grad_() for lp in current])
            self.old.append([(lp + draw(len(lp), spread)).to(dtype) for lp in current])
            self.ref.append([(lp + draw(len(lp), spread)).to(dtype) for lp in current])
            self.rollout.append([(lp + draw(len(lp), spread)).to(dtype) for lp in self.old[-1]])
            self.masks.append([torch.ones(n, dtype=torch.long) for n in group])
            self.advantages.append(draw(len(group), 1.0).tolist())
            for i, mask in ((masks or {}).get(g) or {}).items():
                self.masks[g][i] = torch.tensor(mask)

    @property
    def denominators(self):
        return Denominators.of(
            [[int(mask.sum()) for mask in group] for group in self.masks],
            [[len(mask) for mask in group] for group in self.masks],
        )

    def branch(self, config, g, i, **changes):
        fields = {
            "advantage": self.advantages[g][i],
            "group_size": len(self.logprobs[g]),
            "denominators": self.denominators,
            "config": config,
            "loss_mask": self.masks[g][i],
            "old_logprobs": self.old[g][i],
            "ref_logprobs": self.ref[g][i],
            "rollout_logprobs": self.rollout[g][i],
        }
        return branch_objective(self.logprobs[g][i], **(fields | changes))

    def indices(self):
        return [(g, i) for g, group in enumerate(self.logprobs) for i in range(len(group))]


def _ratio_reference(config, batch, g, i):
    """The ratio of every loss token, as a function of the logprobs; GSPO's is one number for the branch."""
    tokens = [t for t, m in enumerate(batch.masks[g][i].tolist()) if m]
    logs = [batch.logprobs[g][i][t] - batch.old[g][i][t] for t in tokens]
    if config.name == "gspo":
        return [torch.exp(sum(logs) / len(logs))] * len(logs)
    return [torch.exp(log) for log in logs]


def weight_reference(config, batch, g, i):
    tokens = [t for t, m in enumerate(batch.masks[g][i].tolist()) if m]
    gaps = [float(batch.old[g][i][t] - batch.rollout[g][i][t]) for t in tokens]
    if config.rollout_level == "sequence":
        gaps = [sum(gaps)] * len(gaps)
    out = []
    for gap in gaps:
        w = math.exp(gap)
        if config.rollout_correction == "tis":
            w = min(max(w, config.rollout_threshold_low), config.rollout_threshold)
        elif config.rollout_correction == "mis":
            w = w if config.rollout_threshold_low <= w <= config.rollout_threshold else 0.0
        else:
            w = 1.0
        out.append(w)
    return out


def _policy_reference(config, ratio, advantage, logprob):
    clipped = min(max(ratio.item(), 1 - config.clip_low), 1 + config.clip_high)
    if config.name == "cispo":
        return -clipped * advantage * logprob
    gain = (
        ratio * advantage
        if ratio.item() * advantage <= clipped * advantage
        else torch.tensor(clipped * advantage, dtype=F64)
    )
    if config.clip_dual is not None and advantage < 0 and gain.item() < config.clip_dual * advantage:
        gain = torch.tensor(config.clip_dual * advantage, dtype=F64)
    return -gain


def _kl_reference(config, logprob, ref):
    if config.kl_type == "k1":
        return logprob - ref
    if config.kl_type == "k2":
        return (logprob - ref) ** 2 / 2
    return torch.exp(ref - logprob) - (ref - logprob) - 1


def reference(config, batch):
    """The global loss in one expression per aggregation."""
    losses = {}
    for g, i in batch.indices():
        tokens = [t for t, m in enumerate(batch.masks[g][i].tolist()) if m]
        if not tokens:
            losses[g, i] = []
            continue
        ratios, weights = _ratio_reference(config, batch, g, i), weight_reference(config, batch, g, i)
        losses[g, i] = [
            weight * _policy_reference(config, ratio, batch.advantages[g][i], batch.logprobs[g][i][t])
            + config.kl_coef * _kl_reference(config, batch.logprobs[g][i][t], batch.ref[g][i][t])
            for t, ratio, weight in zip(tokens, ratios, weights, strict=True)
        ]
    if config.aggregation == "token-mean":
        tokens = [loss for branch in losses.values() for loss in branch]
        return sum(tokens) / len(tokens)
    longest = max(len(lp) for group in batch.logprobs for lp in group)
    total = 0.0
    for g, group in enumerate(batch.logprobs):
        group_total = 0.0
        for i in range(len(group)):
            if not losses[g, i]:
                continue
            by = (
                len(losses[g, i]) if config.aggregation == "seq-mean-token-mean" else config.aggregation_norm or longest
            )
            group_total = group_total + sum(losses[g, i]) / by
        total = total + group_total / len(group)
    return total / len(batch.logprobs)
