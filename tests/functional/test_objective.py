"""The objectives against their papers' formulas, written token by token over the whole global batch at once."""

import math

import pytest
import torch
from objective_reference import F64, LENGTHS, MASKS, NAMES, Batch, reference, weight_reference

from longstraw_megatron.functional.objective import Denominators, branch_objective
from longstraw_megatron.functional.objective_config import ObjectiveConfig
from longstraw_megatron.functional.objective_stats import SUMS, empty_stats, merge_stats, summarize_stats


def _check(config, batch, rel=1e-12):
    want = reference(config, batch)
    leaves = [lp for group in batch.logprobs for lp in group]
    want_grads = torch.autograd.grad(want, leaves, allow_unused=True)
    results = [batch.branch(config, g, i) for g, i in batch.indices()]
    got = sum(result.loss for result in results)
    assert float(got) == pytest.approx(want.item(), rel=rel, abs=1e-15)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in want_grads if grad is not None))
    assert norm > 0
    for result, leaf, grad in zip(results, leaves, want_grads, strict=True):
        grad = torch.zeros_like(leaf) if grad is None else grad
        assert result.grad_logprobs.dtype == leaf.dtype
        assert float((result.grad_logprobs - grad).norm()) <= rel * norm
    return results


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", [None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("seed", [0, 1])
def test_objective_is_its_formula(name, aggregation, seed):
    _check(ObjectiveConfig(name=name, aggregation=aggregation), Batch(LENGTHS, seed=seed, masks=MASKS))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_kl_term(name, kl_type):
    _check(ObjectiveConfig(name=name, kl_coef=0.3, kl_type=kl_type), Batch(LENGTHS, masks=MASKS))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("low", [None, 0.8])
def test_rollout_correction(name, correction, level, low):
    if name == "gspo" and level == "token":
        return _check_gspo_token_weights(correction, low)
    config = ObjectiveConfig(
        name=name,
        rollout_correction=correction,
        rollout_level=level,
        rollout_threshold=1.2,
        rollout_threshold_low=low,
        kl_coef=0.1,
    )
    _check(config, Batch(LENGTHS, masks=MASKS))


def _check_gspo_token_weights(correction, low):
    """Weights that differ by token: GSPO-token's gradient is w_t s A, not the mean weight's (2507.18071, sec. 4.3)."""
    config = ObjectiveConfig(
        name="gspo",
        rollout_correction=correction,
        rollout_threshold=1.2,
        rollout_threshold_low=low,
        clip_high=9.0,
        clip_low=1.0,
    )
    batch = Batch([[6]])
    log_ratio = (batch.logprobs[0][0] - batch.old[0][0]).detach()
    weights = torch.tensor(weight_reference(config, batch, 0, 0), dtype=F64)
    want = -weights * log_ratio.mean().exp() * batch.advantages[0][0] / 6
    torch.testing.assert_close(batch.branch(config, 0, 0).grad_logprobs, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_dual_clip(name):
    batch = Batch(LENGTHS, masks=MASKS, spread=1.5)
    batch.advantages = [[-1.0, -0.5, 1.0], [-2.0, 0.7]]
    results = _check(ObjectiveConfig(name=name, clip_dual=1.3), batch)
    assert sum(float(result.stats["clipped_dual"]) for result in results) > 0


def test_the_default_by_hand():
    """-1/G sum_i 1/R_i sum_t min(r A, clip(r) A), with every case of the clip."""
    config = ObjectiveConfig()
    ratios = [[2.0, 0.5], [2.0, 0.5, 1.1]]
    advantages = [3.0, -1.0]
    grads, losses = [], []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        old = torch.full((len(ratio),), -1.0, dtype=F64)
        out = branch_objective(
            old + torch.tensor(ratio, dtype=F64).log(),
            advantage=advantage,
            group_size=2,
            denominators=Denominators.of([[2, 3]], [[2, 3]]),
            config=config,
            old_logprobs=old,
        )
        grads.append(out.grad_logprobs.tolist())
        losses.append(float(out.loss))
    assert losses == pytest.approx([-(1.2 * 3 + 0.5 * 3) / 4, (2.0 + 0.8 + 1.1) / 6])
    assert grads[0] == pytest.approx([0.0, -0.5 * 3 / 4])
    assert grads[1] == pytest.approx([2.0 / 6, 0.0, 1.1 / 6])


@pytest.mark.parametrize("name", NAMES)
def test_absent_old_logprobs_are_the_current_ones(name):
    """Ratio 1 with the gradient of the policy gradient, -A / denominator, for every objective."""
    batch = Batch(LENGTHS, masks=MASKS)
    config = ObjectiveConfig(name=name)
    for g, i in batch.indices():
        got = batch.branch(config, g, i, old_logprobs=None)
        same = batch.branch(config, g, i, old_logprobs=batch.logprobs[g][i].detach())
        assert torch.equal(got.grad_logprobs, same.grad_logprobs)
        mask = batch.masks[g][i].to(F64)
        by = {"token-mean": batch.denominators.num_loss_tokens}.get(config.aggregation)
        by = by or 2 * len(LENGTHS[g]) * (8 if name == "dr_grpo" else float(mask.sum()))
        torch.testing.assert_close(got.grad_logprobs, -mask * batch.advantages[g][i] / by, rtol=1e-12, atol=0)
        assert float(got.stats["ratio_max"]) == float(got.stats["ratio_min"]) == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_any_split_into_microbatches_and_ranks_is_bitwise_the_same(name):
    """A branch's gradient depends on global integers only; two ways of walking the batch give equal gradients."""
    batch = Batch([[4, 2, 6, 1], [3], [5, 5]], masks={0: {2: [0] * 6}})
    config = ObjectiveConfig(name=name, kl_coef=0.05)
    at_once = {index: batch.branch(config, *index) for index in batch.indices()}
    whole = sum(result.loss for result in at_once.values())
    for split in (
        [[(0, 3)], [(0, 0), (2, 1)], [(1, 0)], [(0, 1), (0, 2)], [(2, 0)]],
        [[index] for index in batch.indices()],
    ):
        parts, merged = [], empty_stats()
        for microbatch in split:
            results = {index: batch.branch(config, *index) for index in microbatch}
            parts.append(sum(result.loss for result in results.values()))
            for index, result in results.items():
                assert torch.equal(result.grad_logprobs, at_once[index].grad_logprobs)
                merged = merge_stats(merged, result.stats)
        assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-14)
        assert float(merged["loss"]) == pytest.approx(float(whole), rel=1e-14)


def test_branch_without_loss_tokens_adds_nothing_but_counts():
    masked = Batch([[3, 4]], masks={0: {1: [0, 0, 0, 0]}})
    config = ObjectiveConfig()
    empty = masked.branch(config, 0, 1)
    assert float(empty.loss) == 0 and not empty.grad_logprobs.any() and empty.grad_logprobs.shape == (4,)
    assert float(empty.stats["num_branches"]) == 1 and float(empty.stats["num_tokens"]) == 0
    alone = masked.branch(config, 0, 0, group_size=1)
    torch.testing.assert_close(masked.branch(config, 0, 0).grad_logprobs, alone.grad_logprobs / 2, rtol=1e-15, atol=0)
    _check(config, masked)


def test_advantage_per_token():
    batch = Batch([[5]], masks={0: {0: [1, 1, 0, 1, 1]}})
    advantage = torch.tensor([1.0, -2.0, torch.nan, 0.0, 0.5])
    for name in NAMES:
        config = ObjectiveConfig(name=name, clip_low=1.0, clip_high=100.0)
        got = batch.branch(config, 0, 0, advantage=advantage).grad_logprobs
        ones = batch.branch(config, 0, 0, advantage=1.0).grad_logprobs
        want = ones * torch.tensor([1.0, -2.0, 0.0, 0.0, 0.5], dtype=F64)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_stats_are_sums_over_loss_tokens():
    batch = Batch([[5, 1], [4]], masks={0: {0: [1, 0, 1, 1, 0]}}, spread=0.6)
    config = ObjectiveConfig(kl_coef=0.2, rollout_correction="mis", rollout_threshold=1.5)
    merged = empty_stats()
    for index in batch.indices():
        result = batch.branch(config, *index)
        assert list(result.stats) == list(merged)
        merged = merge_stats(merged, result.stats)

    tokens = [(g, i, t) for g, i in batch.indices() for t in batch.masks[g][i].nonzero()[:, 0].tolist()]
    lp, old, ref, rollout = (
        [table[g][i][t].item() for g, i, t in tokens] for table in (batch.logprobs, batch.old, batch.ref, batch.rollout)
    )
    advantages = [batch.advantages[g][i] for g, i, _ in tokens]
    ratio = [math.exp(a - b) for a, b in zip(lp, old, strict=True)]
    weights = [math.exp(a - b) for a, b in zip(old, rollout, strict=True)]
    kept = [w if 1 / 1.5 <= w <= 1.5 else 0.0 for w in weights]
    want = {
        "num_branches": 3,
        "num_tokens": 8,
        "logprobs": sum(lp),
        "ratio": sum(ratio),
        "clipped_low": sum(r < 0.8 and a < 0 for r, a in zip(ratio, advantages, strict=True)),
        "clipped_high": sum(r > 1.2 and a > 0 for r, a in zip(ratio, advantages, strict=True)),
        "clipped_dual": 0,
        "old_kl_k1": sum(b - a for a, b in zip(lp, old, strict=True)),
        "old_kl_k3": sum(r - 1 - math.log(r) for r in ratio),
        "num_ref_tokens": 8,
        "ref_kl": sum(math.exp(b - a) - (b - a) - 1 for a, b in zip(lp, ref, strict=True)),
        "num_rollout_tokens": 8,
        "rollout_weight": sum(kept),
        "rollout_changed": sum(k != w for k, w in zip(kept, weights, strict=True)),
        "rollout_abs_diff": sum(abs(a - b) for a, b in zip(old, rollout, strict=True)),
        "rollout_kl_k3": sum(w - 1 - math.log(w) for w in weights),
        "ratio_max": max(ratio),
        "ratio_min": min(ratio),
        "rollout_abs_diff_max": max(abs(a - b) for a, b in zip(old, rollout, strict=True)),
    }
    assert want["clipped_low"] + want["clipped_high"] > 0 and want["rollout_changed"] > 0
    for name, value in want.items():
        assert float(merged[name]) == pytest.approx(value, rel=1e-12), name
    assert float(merged["policy_loss"] + merged["kl_loss"]) == pytest.approx(float(reference(config, batch)), rel=1e-12)

    summary = summarize_stats(merged)
    assert summary["ratio_mean"] == pytest.approx(sum(ratio) / 8)
    assert summary["rollout_weight_mean"] == pytest.approx(sum(kept) / 8)
    assert summary["clip_fraction_high"] == want["clipped_high"] / 8
    assert summary["ratio_max"] == pytest.approx(max(ratio))
    assert set(summarize_stats(empty_stats())) == {"loss", "policy_loss", "kl_loss", "num_branches", "num_tokens"}
    assert set(SUMS) <= set(merged)


def test_constant_length_of_dr_grpo():
    config = ObjectiveConfig(name="dr_grpo", aggregation_norm=1000)
    results = _check(config, Batch(LENGTHS, masks=MASKS))
    longest = [Batch(LENGTHS, masks=MASKS).branch(ObjectiveConfig(name="dr_grpo"), 0, i) for i in range(3)]
    for got, other in zip(results, longest, strict=False):
        torch.testing.assert_close(got.grad_logprobs, other.grad_logprobs * 8 / 1000, rtol=1e-14, atol=0)
