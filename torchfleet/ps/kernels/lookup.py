"""From the rows of a batch's distinct keys to the model's inputs, and back from its gradients."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import add_words, copy_words, prefetch_word
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.merge import place_of
from torchfleet.ps.kernels.row_vectors import add_to_rows, sum_rows

ABSENT = -1
NOTHING = np.float32(-0.0)  # a sum without addends: NOTHING + x is x bit for bit, also for -0.0
_ONE = np.uint64(1)
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

    stride: the distance in grads between the first numbers of two rows. A row that is not touched yet holds NOTHING.
    """
    size, stride = np.uint64(dim), np.uint64(stride)
    for i in range(len(index_N)):
        u = index_N[i]
        if u >= 0:
            touched_U[u] = True
            add_words(sums, np.uint64(u) * size, grads, np.uint64(i) * stride, size)


@inlined
def _num_real(index_N: np.ndarray, start: np.uint64, stop: np.uint64) -> int:
    """How many of these indices are no padding."""
    num = 0
    for i in range(start, stop):
        num += index_N[i] >= 0
    return num


@inlined
def _sum_real(
    out: np.ndarray,
    to: np.uint64,
    rows: np.ndarray,
    index_N: np.ndarray,
    start: np.uint64,
    stop: np.uint64,
    size: np.uint64,
) -> None:
    """`sum_rows` of the indices that are no padding."""
    for d in range(size):
        out[to + d] = 0
    for i in range(start, stop):
        if index_N[i] >= 0:
            add_words(out, to, rows, np.uint64(index_N[i]) * size, size)


@kernel
def pool(
    rows: np.ndarray,
    dim: int,
    index_N: np.ndarray,
    offsets_B1: np.ndarray,
    num_slots: int,
    mean: bool,
    out: np.ndarray,
    first: int,
    last: int,
) -> None:
    """The sum (or mean) of rows[index_N[i]] for i from offsets_B1[b] to offsets_B1[b + 1]; an empty bag is zeros.

    Bags come slot by slot and go out sample by sample: out has shape (samples, num_slots, dim). Only those of the
    samples from `first` to `last` are written. Negative indices (padding) count neither in the sum nor in the mean.
    """
    size, stride = np.uint64(dim), np.uint64(dim * num_slots)
    num_samples = (len(offsets_B1) - 1) // num_slots
    for slot in range(num_slots):
        to = np.uint64(slot) * size + np.uint64(first) * stride
        for b in range(slot * num_samples + first, slot * num_samples + last):
            start, stop = np.uint64(offsets_B1[b]), np.uint64(offsets_B1[b + 1])
            if stop == start + _ONE and index_N[start] >= 0:  # one id: copy its row
                copy_words(out, to, rows, np.uint64(index_N[start]) * size, size)
                to += stride
                continue
            num = _num_real(index_N, start, stop)
            if num == np.int64(stop - start):
                sum_rows(out, to, rows, index_N, start, stop, size)
            else:
                _sum_real(out, to, rows, index_N, start, stop, size)
            if mean and num > 1:
                for d in range(size):
                    out[to + d] /= np.float32(num)
            to += stride


@inlined
def _add_to_real(
    sums: np.ndarray,
    index_N: np.ndarray,
    start: np.uint64,
    stop: np.uint64,
    grads: np.ndarray,
    source: np.uint64,
    share: np.float32,
    size: np.uint64,
) -> None:
    """`add_to_rows` for the indices that are no padding."""
    for i in range(start, stop):
        if index_N[i] >= 0:
            add_to_rows(sums, index_N, i, i + _ONE, grads, source, share, size)


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

    stride: the distance in grads between the first numbers of two samples. A row that is not touched yet holds NOTHING.
    """
    size, stride = np.uint64(dim), np.uint64(stride)
    num_samples = (len(offsets_B1) - 1) // num_slots
    ahead = _AHEAD * stride  # samples are too far apart for the hardware prefetcher
    for i in range(len(index_N)):
        if index_N[i] >= 0:
            touched_U[index_N[i]] = True
    for slot in range(num_slots):
        source = np.uint64(slot) * size
        for b in range(slot * num_samples, (slot + 1) * num_samples):
            prefetch_word(grads, source + ahead)
            prefetch_word(grads, source + ahead + size)
            start, stop = np.uint64(offsets_B1[b]), np.uint64(offsets_B1[b + 1])
            if stop == start + _ONE:  # one id
                if index_N[start] >= 0:
                    add_words(sums, np.uint64(index_N[start]) * size, grads, source, size)
                source += stride
                continue
            num = _num_real(index_N, start, stop)
            share = np.float32(1.0 / num) if mean and num > 1 else np.float32(1.0)
            if num == np.int64(stop - start):
                add_to_rows(sums, index_N, start, stop, grads, source, share, size)
            else:
                _add_to_real(sums, index_N, start, stop, grads, source, share, size)
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
