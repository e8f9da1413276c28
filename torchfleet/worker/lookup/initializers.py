"""First values of new rows: what `SparseEmbedding(initializer=...)` takes."""

from __future__ import annotations

from torchfleet.tables.settings.spec import Initializer


def Constant(value: float) -> Initializer:
    """Every number of a new row is `value`."""
    return Initializer("constant", float(value))


def Uniform(low: float, high: float) -> Initializer:
    """Numbers evenly spread between `low` and `high`."""
    return Initializer("uniform", float(low), float(high))


def Normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normally distributed numbers."""
    return Initializer("normal", float(mean), float(std))


def TruncatedNormal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normally distributed numbers within two standard deviations."""
    return Initializer("truncated_normal", float(mean), float(std))
