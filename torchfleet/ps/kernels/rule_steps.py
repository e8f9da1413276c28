"""One number's step by a rule: the formulas that the kernels of rows and of dense blocks share.

All arguments are float32: `w` a weight, `g` its gradient, the others its state and the rule's settings.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.jit import inlined

ONE, ZERO, HALF = np.float32(1.0), np.float32(0.0), np.float32(0.5)
# Bound of FTRL's numbers, far above those of any training. Powers n^p (p ≤ 1) and their differences are finite.
MOST = np.float32(2.0**100)


@inlined
def velocity_step(u: np.float32, g: np.float32, momentum: np.float32, kept: np.float32, is_first: bool) -> np.float32:
    """u ← μ u + kept g, and u ← g at the first update. `kept` is 1 - dampening."""
    return g if is_first else momentum * u + kept * g


@inlined
def rmsprop_scale(s: np.float32, mean: np.float32, eps: np.float32) -> np.float32:
    """√(s - m²) + eps. Rounding may make the difference negative, which has no root: it counts as 0."""
    return np.sqrt(max(s - mean * mean, ZERO)) + eps


@inlined
def ftrl_total(n: np.float32, g: np.float32) -> np.float32:
    """n + g²"""
    return min(n + g * g, MOST)


@inlined
def ftrl_step(
    w: np.float32,
    z: np.float32,
    g: np.float32,
    before: np.float32,
    root: np.float32,
    rate: np.float32,
    l1: np.float32,
    l2: np.float32,
    beta: np.float32,
) -> tuple[np.float32, np.float32]:
    """(w, z) after
    σ = ((n + g²)^p - n^p) / α;  z ← z + g - σ w;
    w ← 0 where |z| ≤ l1, else -(z - sign(z) l1) / ((β + (n + g²)^p) / α + l2)

    `before` and `root` are n^p and (n + g²)^p. The kernels compute them, with a separate loop for p = 1/2: there are
    vector instructions for roots, but not for powers.
    """
    moved = z + (g - (root - before) * w / rate)
    moved = min(max(moved, -MOST), MOST)
    over = abs(moved) - l1
    size = min(over / ((beta + root) / rate + l2), MOST)
    weight = ZERO if over <= ZERO else (-size if moved > ZERO else size)
    return weight, moved


@inlined
def lion_step(
    w: np.float32, m: np.float32, g: np.float32, rate: np.float32, beta1: np.float32, one_less1: np.float32
) -> np.float32:
    """w - lr sign(β1 m + (1 - β1) g)"""
    c = beta1 * m + one_less1 * g
    return w - rate if c > ZERO else (w + rate if c < ZERO else w)
