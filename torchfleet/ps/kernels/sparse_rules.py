"""Further rules on rows of a store. Their layout and conventions are those of kernels/rows.py.

The state of a row stands behind its values: one run of `dim` words for each number of state per value, then the numbers
of the row as a whole.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.jit import kernel
from torchfleet.ps.kernels.row_vectors import subtract_scaled, sum_of_squares
from torchfleet.ps.kernels.rows import BLOCK, bound, fetch_rows
from torchfleet.ps.kernels.rule_steps import (
    HALF,
    ZERO,
    ftrl_step,
    ftrl_total,
    lion_step,
    rmsprop_scale,
    velocity_step,
)

_U0 = np.uint64(0)


@kernel
def momentum_sgd(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    low: float,
    high: float,
) -> np.uint64:
    """u ← μ u + (1 - τ) g (u = g at a row's first update);  w ← w - lr u, or w - lr (g + μ u) with nesterov

    A velocity of -0.0 belongs to a row that was never updated; + 0.0 makes any other zero positive.
    """
    dim = np.uint64(grads_ND.shape[1])
    grads, bits = grads_ND.reshape(-1), store.view(np.uint32)
    rate, mu, kept = np.float32(lr), np.float32(momentum), np.float32(1.0 - dampening)
    low, high = np.float32(low), np.float32(high)
    num_words, fetched = offset + 2 * np.int64(dim), _U0
    for start in range(0, len(rows_N), BLOCK):
        stop = min(start + BLOCK, len(rows_N))
        fetched ^= fetch_rows(bits, width, rows_N[start:stop], num_words)
        for i in range(start, stop):
            w, at = np.uint64(rows_N[i] * width + offset), np.uint64(i) * dim
            for d in range(dim):
                g, old = grads[at + d], store[w + dim + d]
                u = velocity_step(old, g, mu, kept, old == ZERO and np.signbit(old)) + ZERO
                store[w + dim + d] = u
                store[w + d] -= rate * (g + mu * u if nesterov else u)
            bound(store, w, dim, low, high)
    return fetched


@kernel
def rowwise_adagrad(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    lr: float,
    eps: float,
    momentum: float,
    low: float,
    high: float,
) -> np.uint64:
    """s ← s + mean(g²), one number per row;  w ← w - lr / (√s + eps) · g

    With momentum, a velocity per value stands before s:  u ← μ u + g / (√s + eps);  w ← w - lr u
    """
    dim = np.uint64(grads_ND.shape[1])
    grads, bits = grads_ND.reshape(-1), store.view(np.uint32)
    rate, eps, mu = np.float32(lr), np.float32(eps), np.float32(momentum)
    low, high = np.float32(low), np.float32(high)
    behind = dim + dim if mu > ZERO else dim
    num_words, fetched = offset + np.int64(behind) + 1, _U0
    for start in range(0, len(rows_N), BLOCK):
        stop = min(start + BLOCK, len(rows_N))
        fetched ^= fetch_rows(bits, width, rows_N[start:stop], num_words)
        for i in range(start, stop):
            w, at = np.uint64(rows_N[i] * width + offset), np.uint64(i) * dim
            total = store[w + behind] + sum_of_squares(grads, at, dim) / np.float32(dim)
            store[w + behind] = total
            scale = np.sqrt(total) + eps
            if mu > ZERO:
                for d in range(dim):
                    u = mu * store[w + dim + d] + grads[at + d] / scale
                    store[w + dim + d] = u
                    store[w + d] -= rate * u
            else:
                subtract_scaled(store, w, grads, at, dim, rate / scale)
            bound(store, w, dim, low, high)
    return fetched


@kernel
def rmsprop(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    lr: float,
    alpha: float,
    eps: float,
    centered: bool,
    momentum: float,
    low: float,
    high: float,
) -> np.uint64:
    """s ← α s + (1 - α) g²;  w ← w - lr g / (√s + eps)

    centered:  m ← m + (1 - α)(g - m), and √(s - m²) in place of √s. With momentum, g / (√s + eps) goes through a
    velocity, u ← μ u + g / (√s + eps). The state of a value is s, then m if centered, then u with momentum.
    """
    dim = np.uint64(grads_ND.shape[1])
    grads, bits = grads_ND.reshape(-1), store.view(np.uint32)
    rate, kept, new, eps = np.float32(lr), np.float32(alpha), np.float32(1.0 - alpha), np.float32(eps)
    mu, low, high = np.float32(momentum), np.float32(low), np.float32(high)
    mean_at = dim + dim if centered else _U0
    velocity_at = (mean_at if centered else dim) + dim if mu > ZERO else _U0
    num_words, fetched = offset + np.int64(dim) * (2 + centered + (mu > ZERO)), _U0
    for start in range(0, len(rows_N), BLOCK):
        stop = min(start + BLOCK, len(rows_N))
        fetched ^= fetch_rows(bits, width, rows_N[start:stop], num_words)
        for i in range(start, stop):
            w, at = np.uint64(rows_N[i] * width + offset), np.uint64(i) * dim
            for d in range(dim):
                g, mean = grads[at + d], ZERO
                square = kept * store[w + dim + d] + new * (g * g)
                store[w + dim + d] = square
                if centered:
                    mean = store[w + mean_at + d]
                    mean += new * (g - mean)
                    store[w + mean_at + d] = mean
                step = g / rmsprop_scale(square, mean, eps)
                if mu > ZERO:
                    step = mu * store[w + velocity_at + d] + step
                    store[w + velocity_at + d] = step
                store[w + d] -= rate * step
            bound(store, w, dim, low, high)
    return fetched


@kernel
def ftrl(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    lr: float,
    l1: float,
    l2: float,
    beta: float,
    power: float,
    low: float,
    high: float,
) -> np.uint64:
    """The formula of `ftrl_step`; the state of a value is z, then n. A rate of 0 changes nothing."""
    dim = np.uint64(grads_ND.shape[1])
    grads, bits = grads_ND.reshape(-1), store.view(np.uint32)
    rate, l1, l2, beta, power = np.float32(lr), np.float32(l1), np.float32(l2), np.float32(beta), np.float32(power)
    low, high = np.float32(low), np.float32(high)
    num_words, fetched = offset + 3 * np.int64(dim), _U0
    if rate == ZERO:
        return fetched
    for start in range(0, len(rows_N), BLOCK):
        stop = min(start + BLOCK, len(rows_N))
        fetched ^= fetch_rows(bits, width, rows_N[start:stop], num_words)
        for i in range(start, stop):
            w, at = np.uint64(rows_N[i] * width + offset), np.uint64(i) * dim
            z, n = w + dim, w + dim + dim
            if power == HALF:
                for d in range(dim):
                    g, old = grads[at + d], store[n + d]
                    total = ftrl_total(old, g)
                    before, root = np.sqrt(old), np.sqrt(total)
                    weight, moved = ftrl_step(store[w + d], store[z + d], g, before, root, rate, l1, l2, beta)
                    store[w + d], store[z + d], store[n + d] = weight, moved, total
            else:
                for d in range(dim):
                    g, old = grads[at + d], store[n + d]
                    total = ftrl_total(old, g)
                    before, root = old**power, total**power
                    weight, moved = ftrl_step(store[w + d], store[z + d], g, before, root, rate, l1, l2, beta)
                    store[w + d], store[z + d], store[n + d] = weight, moved, total
            bound(store, w, dim, low, high)
    return fetched


@kernel
def lion(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    lr: float,
    beta1: float,
    beta2: float,
    low: float,
    high: float,
) -> np.uint64:
    """w ← w - lr sign(β1 m + (1 - β1) g);  m ← β2 m + (1 - β2) g"""
    dim = np.uint64(grads_ND.shape[1])
    grads, bits = grads_ND.reshape(-1), store.view(np.uint32)
    rate, one, one_less1 = np.float32(lr), np.float32(beta1), np.float32(1.0 - beta1)
    two, one_less2 = np.float32(beta2), np.float32(1.0 - beta2)
    low, high = np.float32(low), np.float32(high)
    num_words, fetched = offset + 2 * np.int64(dim), _U0
    for start in range(0, len(rows_N), BLOCK):
        stop = min(start + BLOCK, len(rows_N))
        fetched ^= fetch_rows(bits, width, rows_N[start:stop], num_words)
        for i in range(start, stop):
            w, at = np.uint64(rows_N[i] * width + offset), np.uint64(i) * dim
            for d in range(dim):
                g, m = grads[at + d], store[w + dim + d]
                store[w + d] = lion_step(store[w + d], m, g, rate, one, one_less1)
                store[w + dim + d] = two * m + one_less2 * g
            bound(store, w, dim, low, high)
    return fetched
