"""The objective's settings, checked when made; None takes the default of the named objective."""

from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.functional.kl import KLType

ObjectiveName = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"]
Aggregation = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"]

# clip_low, clip_high, aggregation, divide_by_std; the papers' own numbers, except cispo's clip_high, which its paper
# leaves open: no lower bound (the ratio is never below 0), and DAPO's upper one.
DEFAULTS: dict[str, tuple[float, float, Aggregation, bool]] = {
    "grpo": (0.2, 0.2, "seq-mean-token-mean", True),
    "dapo": (0.2, 0.28, "token-mean", True),
    "dr_grpo": (0.2, 0.2, "seq-mean-token-sum-norm", False),
    "gspo": (3e-4, 4e-4, "seq-mean-token-mean", True),
    "cispo": (1.0, 0.28, "token-mean", True),
}
CHOICES = {
    "name": tuple(DEFAULTS),
    "kl_type": ("k1", "k2", "k3"),
    "aggregation": ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"),
    "rollout_correction": ("none", "tis", "mis"),
    "rollout_level": ("token", "sequence"),
}
BOUNDS = {  # smallest value that is allowed
    "clip_low": 0,
    "clip_high": 0,
    "clip_dual": 1,
    "kl_coef": 0,
    "aggregation_norm": 1,
    "rollout_threshold": 0,
    "rollout_threshold_low": 0,
}


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Formulas are in `functional/objective.py`. Raises RefusedError for a value that makes no sense."""

    name: ObjectiveName = "grpo"
    clip_low: float | None = None  # distance below 1, grpo 0.2, dapo 0.2, dr_grpo 0.2, gspo 3e-4, cispo 1.0
    clip_high: float | None = None  # distance above 1, grpo 0.2, dapo 0.28, dr_grpo 0.2, gspo 4e-4, cispo 0.28
    clip_dual: float | None = None  # bound of the ratio where the advantage is negative, e.g. 3.0; None: no bound
    kl_coef: float = 0.0
    kl_type: KLType = "k3"
    aggregation: Aggregation | None = None
    aggregation_norm: int | None = None  # L of seq-mean-token-sum-norm; None: longest response of the global batch
    divide_by_std: bool | None = None  # whether advantages are; dr_grpo does not
    rollout_correction: Literal["none", "tis", "mis"] = "none"
    rollout_level: Literal["token", "sequence"] = "token"
    rollout_threshold: float = 2.0  # largest importance weight
    rollout_threshold_low: float | None = None  # smallest; tis 0, mis 1 / rollout_threshold

    def __post_init__(self):
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            if value not in choices and not (key == "aggregation" and value is None):
                raise RefusedError(f"objective.{key} is {value!r}, wanted one of {', '.join(choices)}.")
        clip_low, clip_high, aggregation, divide_by_std = DEFAULTS[self.name]
        low = 0.0 if self.rollout_correction != "mis" or not self.rollout_threshold else 1 / self.rollout_threshold
        self._fill(
            clip_low=clip_low,
            clip_high=clip_high,
            aggregation=aggregation,
            divide_by_std=divide_by_std,
            rollout_threshold_low=low,
        )
        for key, smallest in BOUNDS.items():
            value = getattr(self, key)
            if value is None:
                continue
            if not isinstance(value, Real) or isinstance(value, bool) or not smallest <= value < float("inf"):
                raise RefusedError(f"objective.{key} is {value!r}, wanted a finite number not below {smallest}.")
        if self.name == "cispo" and self.clip_dual is not None:
            raise RefusedError(
                f"objective.clip_dual is {self.clip_dual} for cispo, wanted none, since cispo clips the weight and not "
                "the objective; use clip_high."
            )
        if self.rollout_threshold_low > self.rollout_threshold:
            raise RefusedError(
                f"objective.rollout_threshold_low is {self.rollout_threshold_low}, wanted at most rollout_threshold, "
                f"which is {self.rollout_threshold}."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """The per-token fields that every branch must have."""
        needs = ("ref_logprobs",) if self.kl_coef else ()
        return needs if self.rollout_correction == "none" else (*needs, "rollout_logprobs")

    def check_given(self, **given) -> None:
        """Raise RefusedError where one of `needs` is None among the given fields of a branch."""
        for name in self.needs:
            if given[name] is None:
                key = "kl_coef" if name == "ref_logprobs" else "rollout_correction"
                raise RefusedError(
                    f"A branch has no {name}, wanted them since objective.{key} is {getattr(self, key)}; add them to "
                    "the rollouts or set it off."
                )

    def _fill(self, **defaults) -> None:
        for field in fields(self):
            if field.name in defaults and getattr(self, field.name) is None:
                object.__setattr__(self, field.name, defaults[field.name])
