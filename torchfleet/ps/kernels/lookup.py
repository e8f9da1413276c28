"""From the rows of a batch's distinct keys to the model's inputs, and back from its gradients."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import add_words, copy_words, prefetch_word
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.merge import place_of

ABSENT = -1
_AHEAD = np.uint64(12)  # samples to prefetch ahead


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
def add_rows(
    grads: np.ndarray, dim: int, stride: int, index_N: np.ndarray, sums: np.ndarray, touched_U: np.ndarray
) -> None:
    """sums[index_N[i]] += grads[i], in the order of i; negative indices are ignored. Flat arrays of rows of dim.

    stride: the distance in grads between the first numbers of two rows.
    """
    size, stride = np.uint64(dim), np.uint64(stride)
    for i in range(len(index_N)):
        u = index_N[i]
        if u < 0:
            continue
        to, source = np.uint64(u) * size, np.uint64(i) * stride
        _add(sums, to, grads, source, size, touched_U, u)


@inlined
def _add(
    sums: np.ndarray,
    to: np.uint64,
    grads: np.ndarray,
    source: np.uint64,
    size: np.uint64,
    touched_U: np.ndarray,
    u: np.int32,
) -> None:
    """The first gradient of row u overwrites its sum, so sums need not be zeroed."""
    if touched_U[u]:
        add_words(sums, to, grads, source, size)
    else:
        touched_U[u] = True
        copy_words(sums, to, grads, source, size)


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
    size, stride = np.uint64(dim), np.uint64(dim * num_slots)
    num_samples = (len(offsets_B1) - 1) // num_slots
    for slot in range(num_slots):
        to = np.uint64(slot) * size
        for b in range(slot * num_samples, (slot + 1) * num_samples):
            start, stop = offsets_B1[b], offsets_B1[b + 1]
            if stop == start + 1 and index_N[start] >= 0:  # one id: copy its row
                copy_words(out, to, rows, np.uint64(index_N[start]) * size, size)
                to += stride
                continue
            for d in range(size):
                out[to + d] = 0
            num = 0
            for i in range(start, stop):
                if index_N[i] >= 0:
                    num += 1
                    source = np.uint64(index_N[i]) * size
                    for d in range(size):
                        out[to + d] += rows[source + d]
            if mean and num > 1:
                for d in range(size):
                    out[to + d] /= np.float32(num)
            to += stride


@kernel
def unpool(
    grads: np.ndarray,
    dim: int,
    stride: int,
    index_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_slots: int,
    mean: bool,
    sums: np.ndarray,
    touched_U: np.ndarray,
) -> None:
    """The gradient of `pool`: each row of a bag gets the bag's gradient, divided by its length for a mean.

    stride: the distance in grads between the first numbers of two samples.
    """
    size, stride = np.uint64(dim), np.uint64(stride)
    num_samples = (len(offsets_B1) - 1) // num_slots
    ahead = _AHEAD * stride  # samples are too far apart for the hardware prefetcher
    for slot in range(num_slots):
        source = np.uint64(slot) * size
        for b in range(slot * num_samples, (slot + 1) * num_samples):
            prefetch_word(grads, source + ahead)
            prefetch_word(grads, source + ahead + size)
            start, stop = offsets_B1[b], offsets_B1[b + 1]
            if stop == start + 1:  # one id
                u = index_N[start]
                if u >= 0:
                    _add(sums, np.uint64(u) * size, grads, source, size, touched_U, u)
                source += stride
                continue
            num = 0
            for i in range(start, stop if mean else start):
                num += index_N[i] >= 0
            share = np.float32(1.0 / num) if num > 1 else np.float32(1.0)
            for i in range(start, stop):
                u = index_N[i]
                if u < 0:
                    continue
                to = np.uint64(u) * size
                if touched_U[u]:
                    for d in range(size):
                        sums[to + d] += share * grads[source + d]
                else:
                    touched_U[u] = True
                    for d in range(size):
                        sums[to + d] = share * grads[source + d]
            source += stride


@kernel
def add_shows(
    index_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_samples: int,
    by_slot: bool,
    shows_S: np.ndarray,
    clicks_S: np.ndarray,
    sums_U3: np.ndarray,
) -> None:
    """sums_U3[u] += (show, click) of the sample at every position where index_N is u; the last column is the slot, from
    1.

    Bag b holds the positions from offsets_B1[b] on. Bags are ordered slot by slot (by_slot), or sample by sample.
    """
    num_slots = (len(offsets_B1) - 1) // max(1, num_samples)
    for b in range(len(offsets_B1) - 1):
        sample = b % num_samples if by_slot else b // num_slots
        slot = b // num_samples if by_slot else b % num_slots
        for i in range(offsets_B1[b], offsets_B1[b + 1]):
            u = index_N[i]
            if u >= 0:
                sums_U3[u, 0] += shows_S[sample]
                sums_U3[u, 1] += clicks_S[sample]
                sums_U3[u, 2] = np.float32(slot + 1)
