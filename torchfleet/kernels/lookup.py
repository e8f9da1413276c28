"""From the rows of a batch's distinct keys to what a model sees, and back from its gradients."""

from __future__ import annotations

import numpy as np

from torchfleet.kernels.jit import inlined, kernel
from torchfleet.kernels.merge import place_of

ABSENT = -1


@kernel
def index_of(
    keys_N: np.ndarray, places_P: np.ndarray, distinct_U: np.ndarray, index_N: np.ndarray, salt: np.uint64
) -> int:
    """distinct_U[index_N[i]] = keys_N[i], or index_N[i] = ABSENT; returns how many are absent.

    places_P is what merge.unique_inverse made of distinct_U.
    """
    num_absent = 0
    for i in range(len(keys_N)):
        at = place_of(keys_N[i], salt, places_P, distinct_U)
        index_N[i] = places_P[at] - 1
        num_absent += places_P[at] == 0
    return num_absent


@kernel
def add_rows(grads: np.ndarray, dim: int, index_N: np.ndarray, sums: np.ndarray, touched_U: np.ndarray) -> None:
    """sums[index_N[i]] += grads[i], in the order of i; negative indices are passed over. Flat arrays of rows of dim."""
    size = np.uint64(dim)
    for i in range(len(index_N)):
        u = index_N[i]
        if u < 0:
            continue
        to, source = np.uint64(u) * size, np.uint64(i) * size
        if touched_U[u]:
            for d in range(size):
                sums[to + d] += grads[source + d]
        else:
            touched_U[u] = True
            for d in range(size):
                sums[to + d] = grads[source + d]


@inlined
def place_of_bag(bag: int, num_samples: int, num_slots: int) -> np.uint64:
    """Bags lie slot by slot, what becomes of them sample by sample."""
    if num_slots == 1:
        return np.uint64(bag)
    slot = np.uint64(bag) // np.uint64(num_samples)
    return (np.uint64(bag) - slot * np.uint64(num_samples)) * np.uint64(num_slots) + slot


@kernel
def pool(
    rows: np.ndarray,
    dim: int,
    index_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_slots: int,
    mean: bool,
    out: np.ndarray,
) -> None:
    """The sum (or mean) of rows[index_N[i]] for i from offsets_B1[b] to offsets_B1[b + 1]; an empty bag is zeros.

    Bags come slot by slot and go out sample by sample: out has shape (samples, num_slots, dim). Negative indices
    (padding) count neither in the sum nor in the mean.
    """
    size = np.uint64(dim)
    num_samples = (len(offsets_B1) - 1) // num_slots
    for b in range(num_samples * num_slots):
        to = place_of_bag(b, num_samples, num_slots) * size
        for d in range(size):
            out[to + d] = 0
        num = 0
        for i in range(offsets_B1[b], offsets_B1[b + 1]):
            if index_N[i] >= 0:
                num += 1
                source = np.uint64(index_N[i]) * size
                for d in range(size):
                    out[to + d] += rows[source + d]
        if mean and num > 1:
            for d in range(size):
                out[to + d] /= np.float32(num)


@kernel
def unpool(
    grads: np.ndarray,
    dim: int,
    index_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_slots: int,
    mean: bool,
    sums: np.ndarray,
    touched_U: np.ndarray,
) -> None:
    """The gradient of `pool`: each row of a bag gets the bag's gradient, divided by its length for a mean."""
    size = np.uint64(dim)
    num_samples = (len(offsets_B1) - 1) // num_slots
    for b in range(num_samples * num_slots):
        source = place_of_bag(b, num_samples, num_slots) * size
        num = 0
        for i in range(offsets_B1[b], offsets_B1[b + 1]):
            num += index_N[i] >= 0
        share = np.float32(1.0 / num) if mean and num > 1 else np.float32(1.0)
        for i in range(offsets_B1[b], offsets_B1[b + 1]):
            u = index_N[i]
            if u < 0:
                continue
            to = np.uint64(u) * size
            if not touched_U[u]:
                touched_U[u] = True
                for d in range(size):
                    sums[to + d] = 0
            for d in range(size):
                sums[to + d] += share * grads[source + d]
