"""Weighted bags and max-pooled bags, and their gradients.

As in kernels/lookup.py, bags come slot by slot and go out sample by sample, negative indices (padding) are ignored, and
an empty bag is zeros.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.jit import inlined, kernel


@inlined
def _place(b: int, num_samples: int, num_slots: int) -> int:
    """Which row of the output bag b is."""
    return (b % num_samples) * num_slots + b // num_samples


@inlined
def _begin(sums: np.ndarray, touched_U: np.ndarray, u: int, dim: int) -> None:
    """Zero a row's sums before its first gradient."""
    if not touched_U[u]:
        touched_U[u] = True
        for d in range(dim):
            sums[u * dim + d] = 0


@kernel
def pool_weighted(
    rows: np.ndarray,
    dim: int,
    index_N: np.ndarray,
    weights_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_slots: int,
    out: np.ndarray,
) -> None:
    """out[b] = Σ weights_N[i] · rows[index_N[i]] for i from offsets_B1[b] to offsets_B1[b + 1]."""
    num_samples = (len(offsets_B1) - 1) // num_slots
    for b in range(len(offsets_B1) - 1):
        to = _place(b, num_samples, num_slots) * dim
        for d in range(dim):
            out[to + d] = 0
        for i in range(offsets_B1[b], offsets_B1[b + 1]):
            source = index_N[i] * dim
            if source >= 0:
                for d in range(dim):
                    out[to + d] += weights_N[i] * rows[source + d]


@kernel
def unpool_weighted(
    grads: np.ndarray,
    dim: int,
    index_N: np.ndarray,
    weights_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_slots: int,
    sums: np.ndarray,
    touched_U: np.ndarray,
) -> None:
    """sums[index_N[i]] += weights_N[i] · grads[b], for every id of bag b."""
    num_samples = (len(offsets_B1) - 1) // num_slots
    for b in range(len(offsets_B1) - 1):
        source = _place(b, num_samples, num_slots) * dim
        for i in range(offsets_B1[b], offsets_B1[b + 1]):
            u = index_N[i]
            if u >= 0:
                _begin(sums, touched_U, u, dim)
                for d in range(dim):
                    sums[u * dim + d] += weights_N[i] * grads[source + d]


@kernel
def weight_gradients(
    grads: np.ndarray,
    rows: np.ndarray,
    dim: int,
    index_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_slots: int,
    out_N: np.ndarray,
) -> None:
    """out_N[i] = grads[b] · rows[index_N[i]], for every id of bag b; 0 for padding."""
    num_samples = (len(offsets_B1) - 1) // num_slots
    for b in range(len(offsets_B1) - 1):
        to = _place(b, num_samples, num_slots) * dim
        for i in range(offsets_B1[b], offsets_B1[b + 1]):
            source = index_N[i] * dim
            total = np.float32(0)
            if source >= 0:
                for d in range(dim):
                    total += grads[to + d] * rows[source + d]
            out_N[i] = total


@kernel
def pool_max(
    rows: np.ndarray,
    dim: int,
    index_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_slots: int,
    out: np.ndarray,
    winners: np.ndarray,
) -> None:
    """out[b, d] = the largest rows[index_N[i], d] of bag b; winners[b, d] = its row, the first of equal ones, or -1."""
    num_samples = (len(offsets_B1) - 1) // num_slots
    for b in range(len(offsets_B1) - 1):
        to = _place(b, num_samples, num_slots) * dim
        for d in range(dim):
            out[to + d], winners[to + d] = 0, -1
        for i in range(offsets_B1[b], offsets_B1[b + 1]):
            u = index_N[i]
            if u >= 0:
                for d in range(dim):
                    value = rows[u * dim + d]
                    if winners[to + d] < 0 or value > out[to + d]:
                        out[to + d], winners[to + d] = value, u


@kernel
def unpool_max(grads: np.ndarray, dim: int, winners: np.ndarray, sums: np.ndarray, touched_U: np.ndarray) -> None:
    """sums[winners[b, d], d] += grads[b, d], in the order of b."""
    for i in range(len(winners)):
        u = winners[i]
        if u >= 0:
            _begin(sums, touched_U, u, dim)
            sums[u * dim + i % dim] += grads[i]
