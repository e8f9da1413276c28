"""Duplicates in a batch: distinct keys with an inverse, and sums of gradients by key."""

from __future__ import annotations

import os

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.team import TEAM

FEW_PLACES = 1 << 15  # 128 KB
_FEW_KEYS = 1 << 12
FEWEST_SHARED = 1 << 14  # fewest keys per thread, if several threads share the work
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
    keys_N: np.ndarray,
    start: int,
    places_P: np.ndarray,
    distinct_N: np.ndarray,
    num: int,
    inverse_N: np.ndarray,
    salt: np.uint64,
) -> tuple[int, int]:
    """Fill distinct_N with the distinct keys in order of first appearance; keys_N[i] = distinct_N[inverse_N[i]].

    Continues at keys_N[start] with `num` distinct keys, whose numbers are in places_P (`note_places`). Ends at the last
    key, or when places_P is half full. Returns (where it ended, how many distinct keys there are).
    """
    most = len(places_P) // 2
    for i in range(start, len(keys_N)):
        key = keys_N[i]
        at = place_of(key, salt, places_P, distinct_N)
        if places_P[at] == 0:
            if num == most:
                return i, num
            distinct_N[num] = key
            num += 1
            places_P[at] = num
        inverse_N[i] = places_P[at] - 1
    return len(keys_N), num


@kernel
def unique_parts(
    keys_N: np.ndarray,
    ends_T: np.ndarray,
    sizes_T: np.ndarray,
    places_P: np.ndarray,
    distinct_N: np.ndarray,
    starts_T1: np.ndarray,
    inverse_N: np.ndarray,
    own_N: np.ndarray,
    salt: np.uint64,
) -> bool:
    """`unique_inverse` of several parts of keys_N, of which part t ends at ends_T[t]: its distinct keys are
    distinct_N[starts_T1[t] : starts_T1[t + 1]]. inverse_N counts from the first part's first key, own_N from the first
    key of the key's own part. places_P: a power of two, at least twice as long as the longest part.

    Returns whether all keys of each part t are below sizes_T[t].
    """
    first, num, is_below = 0, 0, True
    for t in range(len(ends_T)):
        start = starts_T1[t] = num
        own_U = distinct_N[start:]
        places_P[:] = 0
        for i in range(first, ends_T[t]):
            key = keys_N[i]
            at = place_of(key, salt, places_P, own_U)
            if places_P[at] == 0:
                is_below &= key < sizes_T[t]
                distinct_N[num] = key
                num += 1
                places_P[at] = num - start
            own_N[i] = places_P[at] - 1
            inverse_N[i] = own_N[i] + start
        first = ends_T[t]
    starts_T1[len(ends_T)] = num
    return is_below


@kernel
def all_distinct_keys(keys_N: np.ndarray, places_P: np.ndarray, salt: np.uint64) -> bool:
    """Whether no key repeats. places_P: a power of two, at least twice as long as keys_N; what it holds is lost."""
    places_P[:] = 0
    for i in range(len(keys_N)):
        at = place_of(keys_N[i], salt, places_P, keys_N)
        if places_P[at] != 0:
            return False
        places_P[at] = i + 1
    return True


@kernel
def note_places(distinct_N: np.ndarray, num: int, places_P: np.ndarray, salt: np.uint64) -> None:
    """Put the numbers of `num` distinct keys, from 1, into zeroed places_P, a power of two and at least 2 num long."""
    for i in range(num):
        places_P[place_of(distinct_N[i], salt, places_P, distinct_N)] = i + 1


@kernel
def renumber(numbers_U: np.ndarray, inverse_N: np.ndarray) -> None:
    """inverse_N[i] ← numbers_U[inverse_N[i]]"""
    for i in range(len(inverse_N)):
        inverse_N[i] = numbers_U[inverse_N[i]]


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


class _Distinct:
    """The distinct keys of a batch so far, in order of first appearance."""

    def __init__(self, most: int, num_places: int) -> None:
        """`most`: how many keys may come."""
        self._keys, self._num = np.empty(most, np.uint64), 0
        self.places = np.zeros(num_places, np.int32)

    @property
    def keys(self) -> np.ndarray:
        return self._keys[: self._num]

    def add(self, keys_N: np.ndarray, inverse_N: np.ndarray) -> None:
        """inverse_N[i] = the number of keys_N[i] among the distinct keys. `places` grows with these: places for all
        keys of a large batch, which mostly repeat, would not fit into the cache.
        """
        at, self._num = unique_inverse(keys_N, 0, self.places, self._keys, self._num, inverse_N, SALT)
        while at < len(keys_N):
            self.places = np.zeros(2 * len(self.places), np.int32)
            note_places(self._keys, self._num, self.places, SALT)
            at, self._num = unique_inverse(keys_N, at, self.places, self._keys, self._num, inverse_N, SALT)


def unique_places(keys_N: np.ndarray, many_repeat: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distinct keys in order of first appearance, inverse as int32, the places for `index_of`).

    `many_repeat`: as the ids of a batch do; otherwise there is room for all keys from the beginning.
    """
    total, inverse = len(keys_N), np.empty(len(keys_N), np.int32)
    size = 1 << max(4, (2 * total - 1).bit_length())
    num_places = min(size, max(FEW_PLACES, size >> 2)) if many_repeat else size

    def part(start: int, stop: int) -> tuple[_Distinct, int, int]:
        own = _Distinct(stop - start if start else total, num_places)
        own.add(keys_N[start:stop], inverse[start:stop])
        return own, start, stop

    (whole, *_), *others = TEAM.share(part, total, FEWEST_SHARED)
    for own, start, stop in others:  # each thread has numbered the keys of its part: number them as one
        numbers = np.empty(len(own.keys), np.int32)
        whole.add(own.keys, numbers)
        renumber(numbers, inverse[start:stop])
    return whole.keys, inverse, whole.places


def unique(keys_N: np.ndarray, many_repeat: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """(distinct keys in order of first appearance, inverse as int32); `many_repeat`: as in `unique_places`."""
    return unique_places(keys_N, many_repeat)[:2]


def sum_by_key(keys_N: np.ndarray, grads_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct keys, their summed gradients); the inputs themselves if no key repeats, as in pushes of workers."""
    num = len(keys_N)
    if num <= _FEW_KEYS:  # workers push distinct keys: checking that takes less time than numbering the keys
        places = np.empty(1 << max(4, (2 * num - 1).bit_length()), np.int32)
        if all_distinct_keys(keys_N, places, SALT):
            return keys_N, grads_ND
    distinct, inverse = unique(keys_N, many_repeat=False)
    if len(distinct) == len(keys_N):
        return keys_N, grads_ND
    sums = np.empty((len(distinct), grads_ND.shape[1]), np.float32)
    segment_sum(grads_ND, inverse, sums)
    return distinct, sums
