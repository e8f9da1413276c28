"""Optimizer rules on a flat block of weights, with the formulas of torch.optim's classes of the same name.

`decay` is added to the gradient as decay · w; `shrink` multiplies the weight first (AdamW: 1 - lr · decay).
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.jit import kernel
from torchfleet.ps.kernels.rule_steps import (
    HALF,
    ZERO,
    ftrl_step,
    ftrl_total,
    lion_step,
    rmsprop_scale,
    velocity_step,
)


@kernel
def sgd(
    weights: np.ndarray,
    velocity: np.ndarray,
    grads: np.ndarray,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    decay: float,
    shrink: float,
    step: int,
) -> None:
    """u ← μ u + (1 - τ) g (u = g at the first step);  w ← w - lr u, or w - lr (g + μ u) with nesterov"""
    rate, mu, decay, shrink = np.float32(lr), np.float32(momentum), np.float32(decay), np.float32(shrink)
    kept = np.float32(1.0 - dampening)
    for i in range(len(grads)):
        weight = weights[i] * shrink
        g = grads[i] + decay * weight
        if mu > 0:
            u = velocity_step(velocity[i], g, mu, kept, step == 1)
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


@kernel
def scaled_momentum(
    weights: np.ndarray,
    velocity: np.ndarray,
    sums: np.ndarray,
    grads: np.ndarray,
    lr: float,
    eps: float,
    momentum: float,
    decay: float,
    shrink: float,
) -> None:
    """s ← s + g²;  u ← μ u + g / (√s + eps);  w ← w - lr u"""
    rate, eps, mu = np.float32(lr), np.float32(eps), np.float32(momentum)
    decay, shrink = np.float32(decay), np.float32(shrink)
    for i in range(len(grads)):
        weight = weights[i] * shrink
        g = grads[i] + decay * weight
        sums[i] += g * g
        velocity[i] = mu * velocity[i] + g / (np.sqrt(sums[i]) + eps)
        weights[i] = weight - rate * velocity[i]


@kernel
def rmsprop(
    weights: np.ndarray,
    squares: np.ndarray,
    means: np.ndarray,
    velocity: np.ndarray,
    grads: np.ndarray,
    lr: float,
    alpha: float,
    eps: float,
    centered: bool,
    momentum: float,
    decay: float,
    shrink: float,
) -> None:
    """s ← α s + (1 - α) g²;  m ← m + (1 - α)(g - m);  u ← μ u + g / (√(s - m²) + eps);  w ← w - lr u

    Not centered: m is 0 and `means` is not touched. Without momentum: u is the fraction, `velocity` is not touched.
    """
    rate, kept, new, eps = np.float32(lr), np.float32(alpha), np.float32(1.0 - alpha), np.float32(eps)
    mu, decay, shrink = np.float32(momentum), np.float32(decay), np.float32(shrink)
    for i in range(len(grads)):
        weight = weights[i] * shrink
        g, mean = grads[i] + decay * weight, ZERO
        squares[i] = kept * squares[i] + new * (g * g)
        if centered:
            mean = means[i] + new * (g - means[i])
            means[i] = mean
        step = g / rmsprop_scale(squares[i], mean, eps)
        if mu > ZERO:
            step = mu * velocity[i] + step
            velocity[i] = step
        weights[i] = weight - rate * step


@kernel
def ftrl(
    weights: np.ndarray,
    sums: np.ndarray,
    squares: np.ndarray,
    grads: np.ndarray,
    lr: float,
    l1: float,
    l2: float,
    beta: float,
    power: float,
) -> None:
    """The formula of `ftrl_step`. A rate of 0 changes nothing."""
    rate, l1, l2, beta, power = np.float32(lr), np.float32(l1), np.float32(l2), np.float32(beta), np.float32(power)
    if rate == ZERO:
        return
    if power == HALF:
        for i in range(len(grads)):
            n, total = squares[i], ftrl_total(squares[i], grads[i])
            before, root = np.sqrt(n), np.sqrt(total)
            weights[i], sums[i] = ftrl_step(weights[i], sums[i], grads[i], before, root, rate, l1, l2, beta)
            squares[i] = total
        return
    for i in range(len(grads)):
        n, total = squares[i], ftrl_total(squares[i], grads[i])
        before, root = n**power, total**power
        weights[i], sums[i] = ftrl_step(weights[i], sums[i], grads[i], before, root, rate, l1, l2, beta)
        squares[i] = total


@kernel
def lion(
    weights: np.ndarray,
    means: np.ndarray,
    grads: np.ndarray,
    lr: float,
    beta1: float,
    beta2: float,
    decay: float,
    shrink: float,
) -> None:
    """w ← w - lr sign(β1 m + (1 - β1) g);  m ← β2 m + (1 - β2) g"""
    rate, one, one_less1 = np.float32(lr), np.float32(beta1), np.float32(1.0 - beta1)
    two, one_less2 = np.float32(beta2), np.float32(1.0 - beta2)
    decay, shrink = np.float32(decay), np.float32(shrink)
    for i in range(len(grads)):
        weight = weights[i] * shrink
        g, m = grads[i] + decay * weight, means[i]
        weights[i] = lion_step(weight, m, g, rate, one, one_less1)
        means[i] = two * m + one_less2 * g
