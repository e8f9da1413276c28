"""Initial values of new rows: the argument of `SparseEmbedding(initializer=...)`."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.spec import Initializer


def Constant(value: float) -> Initializer:
    """Every number of a new row is `value`."""
    return Initializer("constant", _number("Constant: value", value))


def Uniform(low: float, high: float) -> Initializer:
    """Numbers uniformly distributed between `low` and `high`."""
    return Initializer("uniform", _number("Uniform: low", low), _number("Uniform: high", high))


def Normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normally distributed numbers."""
    return Initializer("normal", _number("Normal: mean", mean), _number("Normal: std", std))


def TruncatedNormal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normally distributed numbers within two standard deviations."""
    numbers = _number("TruncatedNormal: mean", mean), _number("TruncatedNormal: std", std)
    return Initializer("truncated_normal", *numbers)


def _number(what: str, value: Any) -> float:
    if not isinstance(value, Real):  # a string of digits is not a number
        raise TableError(f"{what} must be a number, found {value!r}")
    return float(value)
