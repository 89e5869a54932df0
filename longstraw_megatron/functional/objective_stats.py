"""Statistics of the objective, kept as sums with their counts so that branches, microbatches and ranks can be merged.

Every `Stats` has the same keys in the same order: SUMS add up, MAXIMA and MINIMA take the larger and the smaller. A
rank without branches has `empty_stats`, so stacking the values for an all-reduce needs no agreement on names.
"""

import torch
from torch import Tensor

from longstraw_megatron.functional.kl import kl_estimate

SUMS = (
    "num_branches",
    "num_tokens",  # R_i
    "loss",  # this and the next two are shares of the global loss, already divided
    "policy_loss",
    "kl_loss",
    "logprobs",
    "ratio",
    "clipped_low",  # tokens whose gradient the clip takes, or whose weight it bounds (cispo)
    "clipped_high",
    "clipped_dual",
    "old_kl_k1",  # KL[old, current]
    "old_kl_k3",
    "num_ref_tokens",
    "ref_kl",  # KL[current, ref] by the configured estimator
    "num_rollout_tokens",
    "rollout_weight",
    "rollout_changed",  # tokens whose weight was truncated or masked
    "rollout_abs_diff",  # |old - rollout|
    "rollout_kl_k3",  # KL[rollout, old]
)
MAXIMA = ("ratio_max", "rollout_abs_diff_max")
MINIMA = ("ratio_min",)

Stats = dict[str, Tensor]  # float64 scalars on the device of the logprobs

PER_TOKEN = {  # name of a mean over loss tokens -> its sum
    "logprobs_mean": "logprobs",
    "ratio_mean": "ratio",
    "clip_fraction_low": "clipped_low",
    "clip_fraction_high": "clipped_high",
    "clip_fraction_dual": "clipped_dual",
    "old_kl_k1": "old_kl_k1",
    "old_kl_k3": "old_kl_k3",
}
PER_ROLLOUT_TOKEN = {
    "rollout_weight_mean": "rollout_weight",
    "rollout_changed_fraction": "rollout_changed",
    "rollout_abs_diff_mean": "rollout_abs_diff",
    "rollout_kl_k3": "rollout_kl_k3",
}


def empty_stats(device: torch.device | str = "cpu") -> Stats:
    """Statistics of no branch: what any others can be merged with."""
    start = dict.fromkeys(SUMS, 0.0) | dict.fromkeys(MAXIMA, -torch.inf) | dict.fromkeys(MINIMA, torch.inf)
    return {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in start.items()}


def branch_stats(logprobs: Tensor, old: Tensor, rollout: Tensor | None, per_token: dict[str, Tensor]) -> Stats:
    """Statistics of a branch from its loss tokens' logprobs [R], R >= 1, and other SUMS given per token or as scalars.

    `per_token` holds at least `ratio`, and `ref_kl` where there is a reference.
    """
    stats = empty_stats(logprobs.device)
    sums = {"logprobs": logprobs, **per_token}
    sums |= {"old_kl_k1": kl_estimate(old, logprobs, "k1"), "old_kl_k3": kl_estimate(old, logprobs, "k3")}
    counts = ["num_tokens", *(["num_ref_tokens"] if "ref_kl" in per_token else [])]
    if rollout is not None:
        sums |= {"rollout_abs_diff": (old - rollout).abs(), "rollout_kl_k3": kl_estimate(rollout, old, "k3")}
        stats["rollout_abs_diff_max"] = sums["rollout_abs_diff"].max().double()
        counts.append("num_rollout_tokens")
    stats["ratio_max"] = per_token["ratio"].max().double()
    stats["ratio_min"] = per_token["ratio"].min().double()
    for name, tensor in sums.items():
        stats[name] = tensor.sum(dtype=torch.float64)
    for name in counts:
        stats[name] += len(logprobs)
    stats["num_branches"] += 1
    return stats


def merge_stats(first: Stats, second: Stats) -> Stats:
    """Statistics of both."""
    merged = {name: first[name] + second[name] for name in SUMS}
    merged |= {name: torch.maximum(first[name], second[name]) for name in MAXIMA}
    return merged | {name: torch.minimum(first[name], second[name]) for name in MINIMA}


def summarize_stats(stats: Stats) -> dict[str, float]:
    """Means, fractions and extremes of merged statistics; what had no token to be measured on is left out."""
    value = {name: float(tensor) for name, tensor in stats.items()}
    summary = {name: value[name] for name in ("loss", "policy_loss", "kl_loss", "num_branches", "num_tokens")}
    if count := value["num_tokens"]:
        summary |= {name: value[key] / count for name, key in PER_TOKEN.items()}
        summary |= {"ratio_max": value["ratio_max"], "ratio_min": value["ratio_min"]}
    if count := value["num_ref_tokens"]:
        summary["ref_kl"] = value["ref_kl"] / count
    if count := value["num_rollout_tokens"]:
        summary |= {name: value[key] / count for name, key in PER_ROLLOUT_TOKEN.items()}
        summary["rollout_abs_diff_max"] = value["rollout_abs_diff_max"]
    return summary
