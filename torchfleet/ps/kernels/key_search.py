"""Search in the map of kernels/hashmap.py: the rows of many keys, and their contents.

Keys are processed in blocks. For each block, tight loops first prefetch all buckets, then all rows, so that the
processor has as many outstanding cache misses as it supports.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import secret_at
from torchfleet.ps.kernels.hashmap import (
    BLOCK,
    FETCHED,
    MISSING,
    MOVED,
    NEW,
    OLD,
    SECRET,
    first_match,
    home_of,
    key_at,
    place_of,
    tag_of,
)
from torchfleet.ps.kernels.intrinsics import PREFETCHES, prefetch_word
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.row_vectors import copy_row
from torchfleet.ps.kernels.rows import fetch_rows
from torchfleet.ps.kernels.statistics import NEVER

_U0, _U8, _LOW = np.uint64(0), np.uint64(8), np.uint64(0xFFFFFFFF)
_LINE = np.uint64(16)  # words in a cache line
_STRETCH = 32  # keys that are fetched while as many before them are handled


@inlined
def _candidates(
    old: np.ndarray,
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    keys_B: np.ndarray,
    rows_B: np.ndarray,
) -> np.uint64:
    """rows_B[i] = a row whose key has the tag of keys_B[i], or MISSING. The caller must use the result.

    A map that is not growing has separate loops: deciding for every key which of two arrays holds it makes the search
    take 1.5 times as long. Tags are computed once and kept in rows_B; the home of a tag is a multiplication.
    """
    moved, secret = np.uint64(state[MOVED]), secret_at(state, SECRET)
    num_old, num_new = num_buckets[OLD], num_buckets[NEW]
    fetched = np.uint64(0)
    for i in range(len(keys_B)):
        rows_B[i] = np.int64(tag_of(keys_B[i], secret))
    if moved >= num_old:
        for i in range(len(keys_B)):
            fetched ^= new[home_of(np.uint64(rows_B[i]), num_new) * _U8]
        for i in range(len(keys_B)):
            tag = np.uint64(rows_B[i])
            rows_B[i] = np.int64(first_match(new, home_of(tag, num_new), tag) & _LOW) - 1
    else:
        for i in range(len(keys_B)):
            tag = np.uint64(rows_B[i])
            home = home_of(tag, num_old)
            fetched ^= new[home_of(tag, num_new) * _U8] if home < moved else old[home * _U8]
        for i in range(len(keys_B)):
            tag = np.uint64(rows_B[i])
            home = home_of(tag, num_old)
            in_new = home < moved
            found = first_match(new, home_of(tag, num_new), tag) if in_new else first_match(old, home, tag)
            rows_B[i] = np.int64(found & _LOW) - 1
    return fetched


@kernel
def _find_exactly(
    old: np.ndarray,
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    words_RW: np.ndarray,
    key: np.uint64,
) -> int:
    """Exact search, for the few keys that share their tag with another key of the map."""
    tag = tag_of(key, secret_at(state, SECRET))
    if home_of(tag, num_buckets[OLD]) < np.uint64(state[MOVED]):
        slot = new[place_of(new, words_RW, key, tag, home_of(tag, num_buckets[NEW]))]
    else:
        slot = old[place_of(old, words_RW, key, tag, home_of(tag, num_buckets[OLD]))]
    return np.int64(slot & _LOW) - 1


@kernel
def find(
    old: np.ndarray,
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    words_RW: np.ndarray,
    keys_N: np.ndarray,
    rows_N: np.ndarray,
    num_words: int,
) -> int:
    """rows_N[i] = row of keys_N[i], or MISSING; returns how many are missing.

    Leaves the first `num_words` words of every row in the cache.
    """
    num_missing, fetched = 0, np.uint64(0)
    for start in range(0, len(keys_N), BLOCK):
        stop = min(start + BLOCK, len(keys_N))
        fetched ^= _candidates(old, new, num_buckets, state, keys_N[start:stop], rows_N[start:stop])
        fetched ^= fetch_rows(words_RW.reshape(-1), words_RW.shape[1], rows_N[start:stop], num_words)
        for i in range(start, stop):
            if rows_N[i] >= 0 and key_at(words_RW, np.uint64(rows_N[i])) != keys_N[i]:
                rows_N[i] = _find_exactly(old, new, num_buckets, state, words_RW, keys_N[i])
            num_missing += rows_N[i] == MISSING
    state[FETCHED] = np.int64(fetched)  # storing the result keeps the prefetch from being optimized away
    return num_missing


@kernel
def _read_ahead(
    old: np.ndarray,
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    words_RW: np.ndarray,
    keys_N: np.ndarray,
    rows_N: np.ndarray,
    offset: int,
    out_NC: np.ndarray,
) -> int:
    """`read` in a map that is not growing, by prefetch instructions: while the rows of one stretch of keys are copied,
    the rows of the next stretch and the buckets of the one after it are being prefetched.
    """
    width, num_words, num = np.int64(words_RW.shape[1]), np.int64(out_NC.shape[1]), len(keys_N)
    num_new, secret, words = num_buckets[NEW], secret_at(state, SECRET), words_RW.reshape(-1)
    last, num_missing = np.uint64(offset + num_words - 1), 0
    for start in range(0, num + 2 * _STRETCH, _STRETCH):
        for i in range(start, min(start + _STRETCH, num)):
            tag = tag_of(keys_N[i], secret)
            rows_N[i] = np.int64(tag)
            prefetch_word(new, home_of(tag, num_new) * _U8)
        for i in range(max(start - _STRETCH, 0), min(start, num)):
            tag = np.uint64(rows_N[i])
            row = np.int64(first_match(new, home_of(tag, num_new), tag) & _LOW) - 1
            rows_N[i] = row
            first = np.uint64(max(row, 0) * width)
            for line in range(_U0, last, _LINE):
                prefetch_word(words, first + line)
            prefetch_word(words, first + last)
        for i in range(max(start - 2 * _STRETCH, 0), min(start - _STRETCH, num)):
            if rows_N[i] >= 0 and key_at(words_RW, np.uint64(rows_N[i])) != keys_N[i]:
                rows_N[i] = _find_exactly(old, new, num_buckets, state, words_RW, keys_N[i])
            if rows_N[i] >= 0:
                copy_row(out_NC, i * num_words, words_RW, rows_N[i] * width + offset, num_words)
            else:
                out_NC[i, :] = 0
                num_missing += 1
    return num_missing


@kernel
def read(
    old: np.ndarray,
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    words_RW: np.ndarray,
    keys_N: np.ndarray,
    rows_N: np.ndarray,
    offset: int,
    out_NC: np.ndarray,
) -> int:
    """`find`, and out_NC[i] = the first C words behind `offset` of the row of keys_N[i]; zeros if it is missing."""
    if PREFETCHES and np.uint64(state[MOVED]) >= num_buckets[OLD]:
        return _read_ahead(old, new, num_buckets, state, words_RW, keys_N, rows_N, offset, out_NC)
    width, num_words = np.int64(words_RW.shape[1]), np.int64(out_NC.shape[1])
    num_missing, fetched = 0, np.uint64(0)
    for start in range(0, len(keys_N), BLOCK):
        stop = min(start + BLOCK, len(keys_N))
        fetched ^= _candidates(old, new, num_buckets, state, keys_N[start:stop], rows_N[start:stop])
        fetched ^= fetch_rows(words_RW.reshape(-1), width, rows_N[start:stop], offset + num_words)
        for i in range(start, stop):
            if rows_N[i] >= 0 and key_at(words_RW, np.uint64(rows_N[i])) != keys_N[i]:
                rows_N[i] = _find_exactly(old, new, num_buckets, state, words_RW, keys_N[i])
            if rows_N[i] >= 0:
                copy_row(out_NC, i * num_words, words_RW, rows_N[i] * width + offset, num_words)
            else:
                out_NC[i, :] = 0
                num_missing += 1
    state[FETCHED] = np.int64(fetched)
    return num_missing


@kernel
def keep_found(
    words_RW: np.ndarray, used_R: np.ndarray, tick: np.uint32, keys_N: np.ndarray, rows_N: np.ndarray, num_words: int
) -> np.uint64:
    """If row rows_N[i] is in use and has the key keys_N[i], it gets the tick; otherwise rows_N[i] becomes MISSING. The
    return value only keeps the prefetches from being optimized away.

    used_R: NEVER for a row that is not in use. Leaves the first `num_words` words of every row in the cache.
    """
    fetched = np.uint64(0)
    for start in range(0, len(keys_N), BLOCK):
        stop = min(start + BLOCK, len(keys_N))
        for i in range(start, stop):
            fetched ^= np.uint64(used_R[max(rows_N[i], 0)])
        fetched ^= fetch_rows(words_RW.reshape(-1), words_RW.shape[1], rows_N[start:stop], num_words)
        for i in range(start, stop):
            row = np.uint64(max(rows_N[i], 0))
            if rows_N[i] >= 0 and used_R[row] != NEVER and key_at(words_RW, row) == keys_N[i]:
                used_R[row] = tick
            else:
                rows_N[i] = MISSING
    return fetched
