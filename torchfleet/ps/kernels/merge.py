"""Duplicates in a batch: distinct keys with an inverse, and sums of gradients by key."""

from __future__ import annotations

import os

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.jit import inlined, kernel

_S32 = np.uint64(32)

# Per process, so that a client that chooses keys cannot make them collide. Passed to the kernels, because numba would
# write a global into its cache.
SALT = np.uint64(int.from_bytes(os.urandom(8), "little"))


@inlined
def place_of(key: np.uint64, salt: np.uint64, places_P: np.ndarray, distinct_U: np.ndarray) -> np.uint64:
    """The position in places_P of this key's number (from 1), or of the 0 that ends its search."""
    mask = np.uint64(len(places_P) - 1)
    at = (mix(key ^ salt) >> _S32) & mask
    while places_P[at] != 0 and distinct_U[places_P[at] - 1] != key:
        at = (at + np.uint64(1)) & mask
    return at


@kernel
def unique_inverse(
    keys_N: np.ndarray, places_P: np.ndarray, distinct_N: np.ndarray, inverse_N: np.ndarray, salt: np.uint64
) -> int:
    """Fill distinct_N with the distinct keys in order of first appearance; keys_N[i] = distinct_N[inverse_N[i]].

    Returns how many there are. `places_P` is zeroed scratch, a power of two and at least 2 N long.
    """
    num = 0
    for i in range(len(keys_N)):
        key = keys_N[i]
        at = place_of(key, salt, places_P, distinct_N)
        if places_P[at] == 0:
            distinct_N[num] = key
            num += 1
            places_P[at] = num
        inverse_N[i] = places_P[at] - 1
    return num


@kernel
def segment_sum(grads_ND: np.ndarray, inverse_N: np.ndarray, sums_UD: np.ndarray) -> None:
    """sums_UD[u] = Σ grads_ND[i] over inverse_N[i] = u, added in the order of i. Every u must appear."""
    num, dim = grads_ND.shape
    seen = 0
    for i in range(num):
        u = inverse_N[i]
        if u == seen:  # first appearances come in the order 0, 1, 2, ...
            seen += 1
            for d in range(dim):
                sums_UD[u, d] = grads_ND[i, d]
        else:
            for d in range(dim):
                sums_UD[u, d] += grads_ND[i, d]


def unique_places(keys_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distinct keys in order of first appearance, inverse as int32, the places for `index_of`)."""
    num = len(keys_N)
    places = np.zeros(1 << max(4, (2 * num - 1).bit_length()), np.int32)
    distinct, inverse = np.empty(num, np.uint64), np.empty(num, np.int32)
    return distinct[: unique_inverse(keys_N, places, distinct, inverse, SALT)], inverse, places


def unique(keys_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct keys in order of first appearance, inverse as int32)."""
    return unique_places(keys_N)[:2]


def sum_by_key(keys_N: np.ndarray, grads_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct keys, their summed gradients); the inputs themselves when no key repeats."""
    distinct, inverse = unique(keys_N)
    if len(distinct) == len(keys_N):
        return keys_N, grads_ND
    sums = np.empty((len(distinct), grads_ND.shape[1]), np.float32)
    segment_sum(grads_ND, inverse, sums)
    return distinct, sums
