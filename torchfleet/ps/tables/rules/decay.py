"""Shared by the rules: weight decay, coupled and decoupled, and bounds on the results of an update."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchfleet.ps.kernels import rows
from torchfleet.ps.tables.settings.rule import Floats, Rule

_TINY = 1.2e-38  # smallest normal float32


def decays(rule: Rule, rate: float) -> tuple[float, float]:
    """(added to a gradient per weight, factor of a weight): coupled and decoupled decay."""
    return (0.0, 1.0 - rate * rule.weight_decay) if rule.decoupled_decay else (rule.weight_decay, 1.0)


def decayed(rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float) -> Floats:
    """Apply decoupled decay to the rows numbered `at`, and return their gradients with coupled weight decay added.

    Kept outside the rules, so that tables without decay, which are most, do not pay for it.
    """
    decay, factor = decays(rule, rate)
    if rule.decoupled_decay:
        rows.shrink(store, *layout, at, grads.shape[1], factor)
        return grads
    out = np.empty_like(grads)
    rows.add_decay(store, *layout, at, grads, decay, out)
    return out


def decay_bounds(rule: Rule, rate: float, grad: float, value: float) -> tuple[float, float]:
    """(bound on a gradient with its coupled decay, bound on a value after its decoupled decay)."""
    coupled, factor = decays(rule, rate)
    value *= max(1.0, 1.000001 * abs(factor))
    return grad + coupled * value, value


def ratio(rule: Rule, above: float) -> float:
    """An upper bound of `above` / (√s + eps) for any s."""
    return above / rule.eps if rule.eps > _TINY else math.inf


def velocity_bound(rule: Rule, held: float, added: float) -> float | None:
    """A bound on a velocity u ← μ u + a with |a| ≤ `added` that all later updates keep, too; None if μ is so close to 1
    that rounding decides.
    """
    one_less = 1.0 - rule.momentum
    return max(held, 2 * added / one_less) if one_less > 1e-5 else None
