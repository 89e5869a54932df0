"""Comparing tensors by relative L2 error, in float64, one by one and over all.

The bounds of `assert_gradients_close` are the project's: over all tensors a relative error, and for each tensor one
relative to it and one relative to all, since a tensor whose gradient nearly cancels is as uncertain as its summands.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Row:
    """One tensor: the L2 norms of `got - want` and of `want`."""

    name: str
    error: float
    norm: float

    @property
    def relative(self) -> float:
        return _ratio(self.error, self.norm)


@dataclass(frozen=True)
class Comparison:
    """Relative L2 error over all tensors and of the worst one; `table` has all of them, worst first."""

    overall: float
    worst_name: str
    worst: float
    table: tuple[Row, ...]
    norm: float  # L2 norm of all wanted tensors together

    def __str__(self) -> str:
        return f"overall {self.overall:.2e}, |want| {self.norm:.3e}\n" + format_rows(self.table)


def _ratio(error: float, norm: float) -> float:
    if error == 0:
        return 0.0
    return error / norm if norm else math.inf


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.detach().to(device="cpu", dtype=torch.float64)).item()


def _difference(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        raise AssertionError(f"The shapes differ: got {tuple(got.shape)}, wanted {tuple(want.shape)}.")
    return _norm(got.detach().cpu().double() - want.detach().cpu().double())


def format_rows(rows: tuple[Row, ...] | list[Row], limit: int = 8) -> str:
    """A line for each of the first `limit` rows."""
    lines = [f"  {row.relative:9.2e} of {row.norm:9.2e}  {row.name}" for row in rows[:limit]]
    return "\n".join([*lines, *([f"  ... and {len(rows) - limit} more"] if len(rows) > limit else [])])


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in L2; 0 where equal, inf where only `want` is 0, nan where anything is nan."""
    return _ratio(_difference(got, want), _norm(want))


def compare_tensors(got: Tensors, want: Tensors) -> Comparison:
    """Compare two tables of tensors with the same names; None counts as a tensor without a value, on both sides alike.

    Raises:
        AssertionError: names, shapes or Nones differ.
    """
    if got.keys() != want.keys():
        extra, missing = sorted(got.keys() - want.keys()), sorted(want.keys() - got.keys())
        raise AssertionError(f"The names differ: {extra} came besides, {missing} are missing.")
    lone = [name for name in want if (got[name] is None) != (want[name] is None)]
    if lone:
        raise AssertionError(f"These have a value on one side only: {lone}.")
    rows = [Row(name, _difference(got[name], want[name]), _norm(want[name])) for name in want if want[name] is not None]
    if not rows:
        raise AssertionError("There is nothing to compare.")
    rows.sort(key=lambda row: math.inf if math.isnan(row.relative) else row.relative, reverse=True)
    norm = math.hypot(*(row.norm for row in rows))
    overall = _ratio(math.hypot(*(row.error for row in rows)), norm)
    return Comparison(overall, rows[0].name, rows[0].relative, tuple(rows), norm)


def assert_gradients_close(
    got: Tensors, want: Tensors, *, overall: float = 1e-5, per_tensor_rel: float = 1e-4, per_tensor_abs: float = 1e-6
) -> Comparison:
    """Relative L2 error at most `overall` over all, and |error| <= rel * |tensor| + abs * |all| for each tensor."""
    comparison = compare_tensors(got, want)
    slack = per_tensor_abs * comparison.norm
    bad = [row for row in comparison.table if not row.error <= per_tensor_rel * row.norm + slack]
    if bad:
        count = f"{len(bad)} of {len(comparison.table)} tensors"
        raise AssertionError(f"{count} have a gradient that is off:\n{format_rows(bad)}\n{comparison}")
    if not comparison.overall <= overall:
        raise AssertionError(f"The gradient is off by more than {overall:.0e} over all:\n{comparison}")
    return comparison


def assert_gradients_vanish(got: Tensors, like: Tensors, *, bound: float = 1e-6) -> None:
    """Every tensor together at most `bound` of `like`, the gradient of the same case where it does not vanish."""
    size = math.hypot(*(_norm(tensor) for tensor in got.values() if tensor is not None))
    scale = math.hypot(*(_norm(tensor) for tensor in like.values() if tensor is not None))
    if not size <= bound * scale or scale == 0:
        raise AssertionError(f"The gradient has norm {size:.2e}, wanted at most {bound:.0e} of {scale:.2e}.")
