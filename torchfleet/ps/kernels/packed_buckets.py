"""Map from any 64-bit key to a row that is stored in the map itself: for rows so narrow that 8 bytes to point at each
would be a large part of them.

A row's number is its place. Places stand in buckets of sixteen. A place has a tag of one byte, 0 when it is empty;
the tags of a bucket are two words of `tags`, compared eight at a time. The key is in the first two words of the row.
The high half of a key's hash decides its home bucket, the low half its tag.

A bucket is filled from its front; a key whose home is full is stored in the next bucket that is not. Invariant: every
bucket between a key's home and the bucket that holds it is full. So a search ends at the first bucket with an empty
last place. Spare buckets behind the last home make it a straight walk without wrap-around. There are enough of them for
all keys of the map (tables/rows/packed_map.py), so that there is room whatever the keys are. The hash depends on a
secret of the map, so that a client that chooses keys cannot make them collide.

Home buckets are in the order of the hash, `high half * num_buckets >> 32`, so with more buckets every home lies at its
old number or above. A map therefore grows inside its own array, from the last bucket down (kernels/packed_moves.py).
The search for a key begins at its old home if that is below `unmoved`, otherwise at its new home.

Rows stay at their places while keys are found and inserted. They move when keys are erased and while the map grows.

`marks` has a word for each bucket: bit j says that the row in place j has changed since the last save began, bit
16 + j that the save under way must write it. They move with the row.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import scramble, secret_at
from torchfleet.ps.kernels.hashmap import key_at
from torchfleet.ps.kernels.intrinsics import copy_words, leading_zeros, trailing_zeros
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.rows import fetch_rows

MISSING = -1
BUCKET = 16  # places
BLOCK = 64  # keys whose memory is prefetched together
NUM_KEYS, UNMOVED, FETCHED, SECRET = range(4)  # places in a map's `state`; the secret is the last
OLD, NEW = 0, 1  # places in a map's `num_buckets`

_U0, _U1, _U2, _U3, _U7, _U8 = (np.uint64(number) for number in (0, 1, 2, 3, 7, 8))
_PLACES = np.uint64(BUCKET)
_S32, _S56, _U71 = np.uint64(32), np.uint64(56), np.uint64(71)
_LOW, _BYTE = np.uint64(0xFFFFFFFF), np.uint64(0xFF)
_ONES, _SEVENS = np.uint64(0x0101010101010101), np.uint64(0x7F7F7F7F7F7F7F7F)


@inlined
def hash_of(key: np.uint64, secret: tuple[np.uint64, ...]) -> np.uint64:
    """A bijection: no two keys have the same hash, so it orders the rows of a map."""
    return scramble(key, secret)


@inlined
def home_of(hashed: np.uint64, num_old: np.uint64, num_new: np.uint64, unmoved: np.uint64) -> np.uint64:
    high = hashed >> _S32
    home = (high * num_old) >> _S32
    return home if home < unmoved else (high * num_new) >> _S32


@inlined
def tag_of(hashed: np.uint64) -> np.uint64:
    """1 to 255."""
    return _U1 + (((hashed & _LOW) * _BYTE) >> _S32)


@inlined
def tag_at(tags: np.ndarray, place: np.uint64) -> np.uint64:
    return (tags[place >> _U3] >> ((place & _U7) << _U3)) & _BYTE


@inlined
def put_tag(tags: np.ndarray, place: np.uint64, tag: np.uint64) -> None:
    shift = (place & _U7) << _U3
    tags[place >> _U3] = (tags[place >> _U3] & ~(_BYTE << shift)) | (tag << shift)


@inlined
def is_full(tags: np.ndarray, bucket: np.uint64) -> bool:
    return (tags[bucket * _U2 + _U1] >> _S56) != _U0


@inlined
def num_taken(tags: np.ndarray, bucket: np.uint64) -> np.uint64:
    low, high = tags[bucket * _U2], tags[bucket * _U2 + _U1]
    return ((_U71 - leading_zeros(low)) >> _U3) + ((_U71 - leading_zeros(high)) >> _U3)


@inlined
def put_key(words_RW: np.ndarray, place: np.uint64, key: np.uint64) -> None:
    words_RW[place, 0] = np.uint32(key & _LOW)
    words_RW[place, 1] = np.uint32(key >> _S32)


@inlined
def _equal_bytes(word: np.uint64, pattern: np.uint64) -> np.uint64:
    """0x80 in every byte in which the two words agree, 0 in the others."""
    x = word ^ pattern
    return ~(((x & _SEVENS) + _SEVENS) | x | _SEVENS)


@inlined
def _candidate(tags: np.ndarray, bucket: np.uint64, pattern: np.uint64) -> int:
    """The first place of a bucket with this tag, or MISSING."""
    low = _equal_bytes(tags[bucket * _U2], pattern)
    high = _equal_bytes(tags[bucket * _U2 + _U1], pattern)
    equal, first = (low, _U0) if low != _U0 else (high, _U8)
    return np.int64(bucket * _PLACES + first + (trailing_zeros(equal) >> _U3)) if equal != _U0 else MISSING


@kernel
def search(tags: np.ndarray, words_RW: np.ndarray, key: np.uint64, tag: np.uint64, home: np.uint64) -> int:
    """The place of `key`; if it is missing, -1 - b, where b is the bucket that has room for it."""
    bucket, pattern = home, tag * _ONES
    while True:
        for half in range(_U2):
            equal = _equal_bytes(tags[bucket * _U2 + half], pattern)
            while equal != _U0:
                place = bucket * _PLACES + half * _U8 + (trailing_zeros(equal) >> _U3)
                if key_at(words_RW, place) == key:
                    return np.int64(place)
                equal &= equal - _U1
        if not is_full(tags, bucket):
            return -1 - np.int64(bucket)
        bucket += _U1


@inlined
def _fetch(tags: np.ndarray, keys_N: np.ndarray, num_buckets: np.ndarray, state: np.ndarray) -> np.uint64:
    """Prefetch the tags of these keys' home buckets; the caller must use the result."""
    unmoved, secret = np.uint64(state[UNMOVED]), secret_at(state, SECRET)
    fetched = _U0
    for i in range(len(keys_N)):
        fetched ^= tags[home_of(hash_of(keys_N[i], secret), num_buckets[OLD], num_buckets[NEW], unmoved) * _U2]
    return fetched


@kernel
def find(
    tags: np.ndarray,
    words_RW: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    keys_N: np.ndarray,
    rows_N: np.ndarray,
    num_words: int,
) -> int:
    """rows_N[i] = place of keys_N[i], or MISSING; returns how many are missing.

    For each block of keys, tight loops first prefetch all tags, then the first `num_words` words of all rows, so that
    the processor has as many outstanding cache misses as it supports.
    """
    unmoved, secret = np.uint64(state[UNMOVED]), secret_at(state, SECRET)
    num_old, num_new = num_buckets[OLD], num_buckets[NEW]
    num_missing, fetched = 0, _U0
    for start in range(0, len(keys_N), BLOCK):
        stop = min(start + BLOCK, len(keys_N))
        for i in range(start, stop):
            hashed = hash_of(keys_N[i], secret)
            rows_N[i] = np.int64((home_of(hashed, num_old, num_new, unmoved) << _U8) | tag_of(hashed))
        for i in range(start, stop):
            fetched ^= tags[(np.uint64(rows_N[i]) >> _U8) * _U2]
        for i in range(start, stop):
            bucket, pattern = np.uint64(rows_N[i]) >> _U8, (np.uint64(rows_N[i]) & _BYTE) * _ONES
            place = _candidate(tags, bucket, pattern)
            while place < 0 and is_full(tags, bucket):
                bucket += _U1
                place = _candidate(tags, bucket, pattern)
            rows_N[i] = place
        fetched ^= fetch_rows(words_RW.reshape(-1), words_RW.shape[1], rows_N[start:stop], num_words)
        for i in range(start, stop):
            if rows_N[i] >= 0 and key_at(words_RW, np.uint64(rows_N[i])) != keys_N[i]:
                hashed = hash_of(keys_N[i], secret)  # another key of the same tag
                home = home_of(hashed, num_old, num_new, unmoved)
                rows_N[i] = max(search(tags, words_RW, keys_N[i], tag_of(hashed), home), MISSING)
            num_missing += rows_N[i] < 0
    state[FETCHED] = np.int64(fetched)  # storing the result keeps the prefetch from being optimized away
    return num_missing


@inlined
def _add(tags: np.ndarray, words_RW: np.ndarray, bucket: np.uint64, key: np.uint64, tag: np.uint64) -> int:
    """A place for a new key in a bucket that is not full."""
    place = bucket * _PLACES + num_taken(tags, bucket)
    put_tag(tags, place, tag)
    put_key(words_RW, place, key)
    return np.int64(place)


@kernel
def insert_missing(
    tags: np.ndarray,
    words_RW: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    keys_N: np.ndarray,
    rows_N: np.ndarray,
    fresh_N: np.ndarray,
) -> int:
    """Give a place to every key that has none; fresh_N gets the positions of these keys. Returns how many.

    rows_N are the keys' places as `find` gave them. They may have moved since: each is checked, and found again. A key
    that repeats gets one place. The caller has made room for len(keys_N) more keys.
    """
    unmoved, secret = np.uint64(state[UNMOVED]), secret_at(state, SECRET)
    num_old, num_new = num_buckets[OLD], num_buckets[NEW]
    num_fresh, fetched = 0, _U0
    for i in range(len(keys_N)):
        if i % BLOCK == 0:
            fetched ^= _fetch(tags, keys_N[i : i + BLOCK], num_buckets, state)
        key, row = keys_N[i], np.uint64(rows_N[i])
        if rows_N[i] >= 0 and tag_at(tags, row) != _U0 and key_at(words_RW, row) == key:
            continue
        hashed = hash_of(key, secret)
        place = search(tags, words_RW, key, tag_of(hashed), home_of(hashed, num_old, num_new, unmoved))
        if place < 0:
            place = _add(tags, words_RW, np.uint64(-1 - place), key, tag_of(hashed))
            state[NUM_KEYS] += 1
            fresh_N[num_fresh] = i
            num_fresh += 1
        rows_N[i] = place
    state[FETCHED] = np.int64(fetched)
    return num_fresh


@kernel
def load(
    tags: np.ndarray,
    words_RW: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    keys_N: np.ndarray,
    values_NC: np.ndarray,
) -> int:
    """find, insert_missing and scatter in one pass: words_RW[place, 2:2 + C] = values_NC[i].

    Among equal keys the last one wins. Returns how many were new.
    """
    unmoved, secret = np.uint64(state[UNMOVED]), secret_at(state, SECRET)
    num_old, num_new = num_buckets[OLD], num_buckets[NEW]
    width, num_words = np.int64(words_RW.shape[1]), np.int64(values_NC.shape[1])
    num_fresh, fetched = 0, _U0
    for i in range(len(keys_N)):
        if i % BLOCK == 0:
            fetched ^= _fetch(tags, keys_N[i : i + BLOCK], num_buckets, state)
        hashed = hash_of(keys_N[i], secret)
        place = search(tags, words_RW, keys_N[i], tag_of(hashed), home_of(hashed, num_old, num_new, unmoved))
        if place < 0:
            place = _add(tags, words_RW, np.uint64(-1 - place), keys_N[i], tag_of(hashed))
            state[NUM_KEYS] += 1
            num_fresh += 1
        copy_words(words_RW, place * width + 2, values_NC, i * num_words, num_words)
    state[FETCHED] = np.int64(fetched)
    return num_fresh
