"""What the objective accepts and refuses: precision, masked entries, NaN and Inf, settings."""

import pytest
import torch
from objective_reference import NAMES, Batch

from longstraw_megatron.errors import NonFiniteError, RefusedError
from longstraw_megatron.functional.objective import Denominators, branch_objective
from longstraw_megatron.functional.objective_config import ObjectiveConfig


def test_mis_lower_bound_defaults_to_the_reciprocal():
    config = ObjectiveConfig(rollout_correction="mis", rollout_threshold=4.0)
    assert config.rollout_threshold_low == 0.25
    assert ObjectiveConfig(rollout_correction="tis", rollout_threshold=4.0).rollout_threshold_low == 0.0


def test_batch_without_any_loss_token_or_token():
    for lengths, masks in (([[2]], {0: {0: [0, 0]}}), ([[0]], None)):
        batch = Batch(lengths, masks=masks)
        for name in NAMES:
            result = batch.branch(ObjectiveConfig(name=name), 0, 0)
            assert float(result.loss) == 0 and not result.grad_logprobs.any()


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
