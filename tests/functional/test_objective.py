"""The objectives against their papers' formulas, written token by token over the whole global batch at once."""

import math

import pytest
import torch

from longstraw_megatron.errors import NonFiniteError, RefusedError
from longstraw_megatron.functional.objective import Denominators, branch_objective
from longstraw_megatron.functional.objective_config import ObjectiveConfig
from longstraw_megatron.functional.objective_stats import SUMS, empty_stats, merge_stats, summarize_stats

F64 = torch.float64


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


def _weight_reference(config, batch, g, i):
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


def _reference(config, batch):
    """The global loss in one expression per aggregation."""
    losses = {}
    for g, i in batch.indices():
        tokens = [t for t, m in enumerate(batch.masks[g][i].tolist()) if m]
        if not tokens:
            losses[g, i] = []
            continue
        ratios, weights = _ratio_reference(config, batch, g, i), _weight_reference(config, batch, g, i)
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


def _check(config, batch, rel=1e-12):
    want = _reference(config, batch)
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


LENGTHS = [[5, 1, 8], [3, 7]]
MASKS = {0: {0: [1, 0, 0, 1, 1]}, 1: {1: [0, 1, 1, 1, 1, 1, 0]}}
NAMES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo"]


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
    weights = torch.tensor(_weight_reference(config, batch, 0, 0), dtype=F64)
    want = -weights * log_ratio.mean().exp() * batch.advantages[0][0] / 6
    torch.testing.assert_close(batch.branch(config, 0, 0).grad_logprobs, want, rtol=1e-12, atol=0)


def test_mis_lower_bound_defaults_to_the_reciprocal():
    config = ObjectiveConfig(rollout_correction="mis", rollout_threshold=4.0)
    assert config.rollout_threshold_low == 0.25
    assert ObjectiveConfig(rollout_correction="tis", rollout_threshold=4.0).rollout_threshold_low == 0.0


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


def test_batch_without_any_loss_token_or_token():
    for lengths, masks in (([[2]], {0: {0: [0, 0]}}), ([[0]], None)):
        batch = Batch(lengths, masks=masks)
        for name in NAMES:
            result = batch.branch(ObjectiveConfig(name=name), 0, 0)
            assert float(result.loss) == 0 and not result.grad_logprobs.any()


def test_advantage_per_token():
    batch = Batch([[5]], masks={0: {0: [1, 1, 0, 1, 1]}})
    advantage = torch.tensor([1.0, -2.0, torch.nan, 0.0, 0.5])
    for name in NAMES:
        config = ObjectiveConfig(name=name, clip_low=1.0, clip_high=100.0)
        got = batch.branch(config, 0, 0, advantage=advantage).grad_logprobs
        ones = batch.branch(config, 0, 0, advantage=1.0).grad_logprobs
        want = ones * torch.tensor([1.0, -2.0, 0.0, 0.0, 0.5], dtype=F64)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_masked_entries_are_not_looked_at():
    batch = Batch([[5]], masks={0: {0: [1, 0, 1, 0, 1]}})
    config = ObjectiveConfig(kl_coef=0.1, rollout_correction="tis", rollout_level="sequence")
    want = batch.branch(config, 0, 0)
    for table in (batch.old, batch.ref, batch.rollout):
        table[0][0] = table[0][0].clone()
        table[0][0][1], table[0][0][3] = torch.nan, torch.inf
    got = batch.branch(config, 0, 0)
    assert torch.equal(got.grad_logprobs, want.grad_logprobs) and torch.equal(got.loss, want.loss)
    assert all(torch.equal(got.stats[name], want.stats[name]) for name in want.stats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arithmetic_is_float32(dtype):
    """bfloat16 logprobs are computed on in float32: the gradient is only rounded at the end."""
    exact = Batch([[6, 3]], dtype=dtype)
    config = ObjectiveConfig(kl_coef=0.1)
    for i in range(2):
        got = exact.branch(config, 0, i)
        exact32 = exact.branch(
            config,
            0,
            i,
            **{n: getattr(exact, k)[0][i].float() for n, k in (("old_logprobs", "old"), ("ref_logprobs", "ref"))},
        )
        assert got.grad_logprobs.dtype == dtype and got.loss.dtype == torch.float32
        assert torch.equal(got.loss, exact32.loss)
        double = branch_objective(
            exact.logprobs[0][i].double(),
            advantage=exact.advantages[0][i],
            group_size=2,
            denominators=exact.denominators,
            config=config,
            old_logprobs=exact.old[0][i].double(),
            ref_logprobs=exact.ref[0][i].double(),
        )
        # float32's epsilon times a few operations; bfloat16 rounds the gradient to 8 bits
        bound = 1e-6 if dtype == torch.float32 else 2**-8
        assert float((got.grad_logprobs.double() - double.grad_logprobs).norm() / double.grad_logprobs.norm()) <= bound
        assert float(got.loss) == pytest.approx(float(double.loss), rel=1e-5, abs=1e-7)


def test_works_under_no_grad_and_leaves_the_input_alone():
    batch = Batch([[4]])
    with torch.no_grad():
        got = batch.branch(ObjectiveConfig(), 0, 0)
    assert torch.equal(got.grad_logprobs, batch.branch(ObjectiveConfig(), 0, 0).grad_logprobs)
    assert batch.logprobs[0][0].grad is None and not got.loss.requires_grad and not got.grad_logprobs.requires_grad


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
        [float(table[g][i][t]) for g, i, t in tokens] for table in (batch.logprobs, batch.old, batch.ref, batch.rollout)
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
    assert float(merged["policy_loss"] + merged["kl_loss"]) == pytest.approx(
        float(_reference(config, batch)), rel=1e-12
    )

    summary = summarize_stats(merged)
    assert summary["ratio_mean"] == pytest.approx(sum(ratio) / 8)
    assert summary["rollout_weight_mean"] == pytest.approx(sum(kept) / 8)
    assert summary["clip_fraction_high"] == want["clipped_high"] / 8
    assert summary["ratio_max"] == pytest.approx(max(ratio))
    assert set(summarize_stats(empty_stats())) == {"loss", "policy_loss", "kl_loss", "num_branches", "num_tokens"}
    assert set(SUMS) <= set(merged)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"])
def test_non_finite_inputs_stop(where, bad):
    batch = Batch([[3]])
    config = ObjectiveConfig(kl_coef=0.1, rollout_correction="tis")
    poisoned = batch.old[0][0].clone()
    poisoned[1] = bad
    if where == "logprobs":
        batch.logprobs[0][0] = poisoned
    with pytest.raises(NonFiniteError, match=f"NaN or Inf in {where};"):
        batch.branch(config, 0, 0, **({} if where == "logprobs" else {where: poisoned}))


def test_overflow_stops():
    batch = Batch([[3]])
    with pytest.raises(NonFiniteError, match="in the loss"):
        batch.branch(ObjectiveConfig(), 0, 0, advantage=-1.0, old_logprobs=batch.old[0][0] - 1e4)
    with pytest.raises(NonFiniteError, match="in the advantage"):
        batch.branch(ObjectiveConfig(), 0, 0, advantage=float("nan"))


def test_long_sequence_weights_do_not_overflow():
    """exp of a sum of thousands of gaps is 0 or inf: truncated or masked, never NaN."""
    batch = Batch([[4000]], spread=0.1)
    for gap, tis, mis in ((0.5, 2.0, 0.0), (-0.5, 0.0, 0.0)):
        for correction, weight in (("tis", tis), ("mis", mis)):
            config = ObjectiveConfig(rollout_correction=correction, rollout_level="sequence")
            got = batch.branch(config, 0, 0, rollout_logprobs=batch.old[0][0] - gap)
            assert float(got.stats["rollout_weight"]) == weight * 4000
            assert float(got.loss) == pytest.approx(weight * float(batch.branch(ObjectiveConfig(), 0, 0).loss))


@pytest.mark.parametrize(
    ("config", "missing", "key"),
    [
        ({"kl_coef": 0.1}, "ref_logprobs", "kl_coef is 0.1"),
        ({"rollout_correction": "tis"}, "rollout_logprobs", "rollout_correction is tis"),
    ],
)
def test_missing_logprobs_are_refused(config, missing, key):
    batch = Batch([[3]])
    assert ObjectiveConfig(**config).needs == (missing,)
    with pytest.raises(RefusedError, match=f"A branch has no {missing}, wanted them since objective.{key}"):
        batch.branch(ObjectiveConfig(**config), 0, 0, **{missing: None})


@pytest.mark.parametrize("name", ["old_logprobs", "loss_mask", "ref_logprobs"])
def test_shapes_that_differ_are_refused(name):
    batch = Batch([[3]])
    with pytest.raises(ValueError, match=rf"{name} has shape \[2\], wanted \[3\]"):
        batch.branch(ObjectiveConfig(), 0, 0, **{name: torch.ones(2)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "ppo"}, r"objective.name is 'ppo', wanted one of grpo, dapo, dr_grpo, gspo, cispo"),
        ({"aggregation": "mean"}, r"objective.aggregation is 'mean', wanted one of seq-mean-token-mean"),
        ({"kl_type": "k4"}, r"objective.kl_type is 'k4'"),
        ({"rollout_correction": None}, r"objective.rollout_correction is None, wanted one of none, tis, mis"),
        ({"clip_low": -0.1}, r"objective.clip_low is -0.1, wanted a finite number not below 0"),
        ({"clip_high": "0.2"}, r"objective.clip_high is '0.2'"),
        ({"kl_coef": float("nan")}, r"objective.kl_coef is nan"),
        ({"clip_dual": 0.5}, r"objective.clip_dual is 0.5, wanted a finite number not below 1"),
        ({"aggregation_norm": 0}, r"objective.aggregation_norm is 0"),
        ({"name": "cispo", "clip_dual": 3.0}, r"objective.clip_dual is 3.0 for cispo"),
        ({"rollout_threshold": 2.0, "rollout_threshold_low": 3.0}, r"rollout_threshold_low is 3.0, wanted at most"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(RefusedError, match=message):
        ObjectiveConfig(**fields)


def test_defaults_of_each_objective():
    got = {name: ObjectiveConfig(name=name) for name in NAMES}
    assert {n: (c.clip_low, c.clip_high, c.aggregation, c.divide_by_std) for n, c in got.items()} == {
        "grpo": (0.2, 0.2, "seq-mean-token-mean", True),
        "dapo": (0.2, 0.28, "token-mean", True),
        "dr_grpo": (0.2, 0.2, "seq-mean-token-sum-norm", False),
        "gspo": (3e-4, 4e-4, "seq-mean-token-mean", True),
        "cispo": (1.0, 0.28, "token-mean", True),
    }
    assert all((c.kl_coef, c.kl_type, c.clip_dual, c.needs) == (0.0, "k3", None, ()) for c in got.values())


def test_denominators_are_counts():
    got = Denominators.of([[2, 0, 3], [1]], [[4, 2, 3], [1]])
    assert got == Denominators(num_groups=2, num_branches=4, num_loss_tokens=6, max_response_length=4)
    assert Denominators.of([], []) == Denominators(0, 0, 0, 0)


def test_constant_length_of_dr_grpo():
    config = ObjectiveConfig(name="dr_grpo", aggregation_norm=1000)
    results = _check(config, Batch(LENGTHS, masks=MASKS))
    longest = [Batch(LENGTHS, masks=MASKS).branch(ObjectiveConfig(name="dr_grpo"), 0, i) for i in range(3)]
    for got, other in zip(results, longest, strict=False):
        torch.testing.assert_close(got.grad_logprobs, other.grad_logprobs * 8 / 1000, rtol=1e-14, atol=0)
