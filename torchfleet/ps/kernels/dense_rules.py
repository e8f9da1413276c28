"""Optimizer rules on a flat block of weights, with the formulas of torch.optim's classes of the same name.

`decay` is added to the gradient as decay · w; `shrink` multiplies the weight first (AdamW: 1 - lr · decay).
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.jit import kernel


@kernel
def sgd(
    weights: np.ndarray,
    velocity: np.ndarray,
    grads: np.ndarray,
    lr: float,
    momentum: float,
    nesterov: bool,
    decay: float,
    shrink: float,
    step: int,
) -> None:
    """u ← μ u + g (u = g at the first step);  w ← w - lr u, or w - lr (g + μ u) with nesterov"""
    rate, mu, decay, shrink = np.float32(lr), np.float32(momentum), np.float32(decay), np.float32(shrink)
    for i in range(len(grads)):
        weight = weights[i] * shrink
        g = grads[i] + decay * weight
        if mu > 0:
            u = g if step == 1 else mu * velocity[i] + g
            velocity[i] = u
            g = g + mu * u if nesterov else u
        weights[i] = weight - rate * g


@kernel
def adagrad(
    weights: np.ndarray, sums: np.ndarray, grads: np.ndarray, lr: float, eps: float, decay: float, shrink: float
) -> None:
    """s ← s + g²;  w ← w - lr g / (√s + eps)"""
    rate, eps, decay, shrink = np.float32(lr), np.float32(eps), np.float32(decay), np.float32(shrink)
    for i in range(len(grads)):
        weight = weights[i] * shrink
        g = grads[i] + decay * weight
        sums[i] += g * g
        weights[i] = weight - rate * g / (np.sqrt(sums[i]) + eps)


@kernel
def adam(
    weights: np.ndarray,
    means: np.ndarray,
    squares: np.ndarray,
    grads: np.ndarray,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    shrink: float,
    step: int,
) -> None:
    """m ← m + (1 - β1)(g - m);  v ← β2 v + (1 - β2) g²;  w ← w - lr / (1 - β1^t) · m / (√v / √(1 - β2^t) + eps)"""
    rate = np.float32(lr / (1.0 - beta1**step))
    root = np.float32(np.sqrt(1.0 - beta2**step))
    one_less1, two, one_less2 = np.float32(1.0 - beta1), np.float32(beta2), np.float32(1.0 - beta2)
    eps, decay, shrink = np.float32(eps), np.float32(decay), np.float32(shrink)
    for i in range(len(grads)):
        weight = weights[i] * shrink
        g = grads[i] + decay * weight
        means[i] += one_less1 * (g - means[i])
        squares[i] = two * squares[i] + one_less2 * (g * g)
        weights[i] = weight - rate * means[i] / (np.sqrt(squares[i]) / root + eps)
