"""The map of a table on two tiers: from the hash of a key to the place of its row, in eight bytes.

A slot holds 28 bits of the key's hash, the tag, and 36 bits of a place; 0 is an empty slot. Keys themselves are not in
the map: two keys may have equal tags, so the caller compares the key that it finds at a place. The map consists of 1024
sub-maps by the first bits of the hash, which grow one by one and in small steps, so that no request waits for the whole
map and its load stays high. A sub-map is a ring of buckets of 16 slots. A key's home bucket is computed from its tag
alone, so that a sub-map can grow without its keys. over_SB counts, for each bucket, the entries that a full bucket has
passed on to the next: a search ends at a bucket that has passed on none.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.intrinsics import prefetch_word
from torchfleet.ps.kernels.jit import inlined, kernel

SUB_BITS = 10
NUM_SUBS = 1 << SUB_BITS
TAG_BITS = 28
PLACE_BITS = 64 - TAG_BITS
BUCKET = 16
MOST_PASSED = 255  # a counter that reached it is never lowered again
_SUB_SHIFT, _TAG_SHIFT = np.uint64(64 - SUB_BITS), np.uint64(64 - SUB_BITS - TAG_BITS)
_TAG_MASK, _TAG_BITS = np.uint64((1 << TAG_BITS) - 1), np.uint64(TAG_BITS)
_PLACE_BITS, _PLACE_MASK = np.uint64(PLACE_BITS), np.uint64((1 << PLACE_BITS) - 1)
_BUCKET, _ONE, _ZERO = np.uint64(BUCKET), np.uint64(1), np.uint64(0)
_AHEAD = 16  # keys to prefetch ahead


@inlined
def _hash(key: np.uint64, salts_2: np.ndarray) -> np.uint64:
    return mix(mix(key ^ salts_2[0]) + salts_2[1])


@inlined
def _sub_of(hashed: np.uint64) -> np.uint64:
    return hashed >> _SUB_SHIFT


@inlined
def _tag_of(hashed: np.uint64) -> np.uint64:
    return (hashed >> _TAG_SHIFT) & _TAG_MASK


@inlined
def _home(tag: np.uint64, num_buckets: np.uint64) -> np.uint64:
    return (tag * num_buckets) >> _TAG_BITS


@inlined
def _fetch(slots_SP: np.ndarray, sizes_S: np.ndarray, salts_2: np.ndarray, keys_N: np.ndarray, i: int) -> None:
    if i < len(keys_N):
        hashed = _hash(keys_N[i], salts_2)
        sub = _sub_of(hashed)
        at = sub * np.uint64(slots_SP.shape[1]) + _home(_tag_of(hashed), sizes_S[sub]) * _BUCKET
        prefetch_word(slots_SP, at)
        prefetch_word(slots_SP, at + np.uint64(8))


@kernel
def find(
    slots_SP: np.ndarray, over_SB: np.ndarray, sizes_S: np.ndarray, salts_2: np.ndarray,
    keys_N: np.ndarray, skips_N: np.ndarray, first_place: np.uint64, places_N: np.ndarray,
) -> int:  # fmt: skip
    """places_N[i] = the place of an entry with the tag of keys_N[i], after skipping skips_N[i] such entries; -1 if no
    other is left. Places below `first_place` are left out. Returns how many were found.
    """
    num_found = 0
    for i in range(min(_AHEAD, len(keys_N))):
        _fetch(slots_SP, sizes_S, salts_2, keys_N, i)
    for i in range(len(keys_N)):
        _fetch(slots_SP, sizes_S, salts_2, keys_N, i + _AHEAD)
        hashed = _hash(keys_N[i], salts_2)
        sub, tag = _sub_of(hashed), _tag_of(hashed)
        size = sizes_S[sub]
        bucket, skip, place = _home(tag, size), skips_N[i], np.int64(-1)
        for _ in range(size):
            for s in range(bucket * _BUCKET, bucket * _BUCKET + _BUCKET):
                slot = slots_SP[sub, s]
                if slot >> _PLACE_BITS == tag and slot & _PLACE_MASK > first_place and place < 0:
                    if skip == 0:
                        place = np.int64((slot & _PLACE_MASK) - _ONE)
                    skip -= 1
            if place >= 0 or over_SB[sub, bucket] == 0:
                break
            bucket += _ONE
            if bucket == size:
                bucket = _ZERO
        places_N[i] = place
        num_found += place >= 0
    return num_found


@inlined
def _put(
    slots_SP: np.ndarray, over_SB: np.ndarray, sub: np.uint64, size: np.uint64, tag: np.uint64, slot: np.uint64
) -> None:
    bucket = _home(tag, size)
    while True:
        for s in range(bucket * _BUCKET, bucket * _BUCKET + _BUCKET):
            if slots_SP[sub, s] == 0:
                slots_SP[sub, s] = slot
                return
        if over_SB[sub, bucket] < MOST_PASSED:
            over_SB[sub, bucket] += 1
        bucket += _ONE
        if bucket == size:
            bucket = _ZERO


@kernel
def insert(
    slots_SP: np.ndarray, over_SB: np.ndarray, sizes_S: np.ndarray, salts_2: np.ndarray,
    counts_S: np.ndarray, limits_S: np.ndarray, keys_N: np.ndarray, places_N: np.ndarray, start: int,
) -> int:  # fmt: skip
    """Enter distinct keys that are not in the map, from `start` on. Returns len(keys_N), or the position of a key whose
    sub-map must grow first.
    """
    for i in range(start, len(keys_N)):
        _fetch(slots_SP, sizes_S, salts_2, keys_N, i + _AHEAD)
        hashed = _hash(keys_N[i], salts_2)
        sub, tag = _sub_of(hashed), _tag_of(hashed)
        if counts_S[sub] >= limits_S[sub]:
            return i
        slot = tag << _PLACE_BITS | (np.uint64(places_N[i]) + _ONE)
        _put(slots_SP, over_SB, sub, sizes_S[sub], tag, slot)
        counts_S[sub] += 1
    return len(keys_N)


@kernel
def replace(
    slots_SP: np.ndarray, over_SB: np.ndarray, sizes_S: np.ndarray, salts_2: np.ndarray,
    counts_S: np.ndarray, keys_N: np.ndarray, old_N: np.ndarray, new_N: np.ndarray,
) -> int:  # fmt: skip
    """Change the places of keys that are in the map from old_N to new_N; a negative new place removes the entry.
    Returns how many were not found, which should be 0.
    """
    num_lost = 0
    for i in range(len(keys_N)):
        _fetch(slots_SP, sizes_S, salts_2, keys_N, i + _AHEAD)
        hashed = _hash(keys_N[i], salts_2)
        sub, tag = _sub_of(hashed), _tag_of(hashed)
        size, home = sizes_S[sub], _home(tag, sizes_S[sub])
        wanted = tag << _PLACE_BITS | (np.uint64(old_N[i]) + _ONE)
        bucket, found = home, False
        for _ in range(size):
            for s in range(bucket * _BUCKET, bucket * _BUCKET + _BUCKET):
                if slots_SP[sub, s] == wanted:
                    found = True
                    slots_SP[sub, s] = _ZERO if new_N[i] < 0 else tag << _PLACE_BITS | (np.uint64(new_N[i]) + _ONE)
            if found or over_SB[sub, bucket] == 0:
                break
            bucket += _ONE
            if bucket == size:
                bucket = _ZERO
        num_lost += not found
        if found and new_N[i] < 0:
            counts_S[sub] -= 1
            _take_back(over_SB, sub, size, home, bucket)
    return num_lost


@inlined
def _take_back(over_SB: np.ndarray, sub: np.uint64, size: np.uint64, home: np.uint64, bucket: np.uint64) -> None:
    """Note that an entry is removed, which the buckets from `home` to the one before `bucket` had passed on."""
    while home != bucket:
        if over_SB[sub, home] < MOST_PASSED:
            over_SB[sub, home] -= 1
        home += _ONE
        if home == size:
            home = _ZERO


@kernel
def grow(
    slots_SP: np.ndarray, over_SB: np.ndarray, sizes_S: np.ndarray, sub: int, size: int, kept_P: np.ndarray
) -> int:
    """Spread the entries of one sub-map over `size` buckets; kept_P has room for all its slots. Returns how many."""
    sub, num = np.uint64(sub), 0
    for s in range(sizes_S[sub] * _BUCKET):
        slot = slots_SP[sub, s]
        if slot:
            kept_P[num] = slot
            num += 1
            slots_SP[sub, s] = _ZERO
    for bucket in range(sizes_S[sub]):
        over_SB[sub, bucket] = 0
    sizes_S[sub] = np.uint64(size)
    for i in range(num):
        _put(slots_SP, over_SB, sub, np.uint64(size), kept_P[i] >> _PLACE_BITS, kept_P[i])
    return num


@kernel
def collect(
    slots_SP: np.ndarray, over_SB: np.ndarray, sizes_S: np.ndarray, sub: int, first: int, last: int,
    places_N: np.ndarray,
) -> int:  # fmt: skip
    """places_N = the places of the entries of one sub-map with tags from `first` to `last`; returns their number, or
    len(places_N) + 1 if there are more than fit.
    """
    num, size = 0, sizes_S[sub]
    bucket, end = _home(np.uint64(first), size), _home(np.uint64(last), size)
    is_behind = False  # in the buckets after the last home, to which entries may have been passed on
    for _ in range(size):
        for s in range(bucket * _BUCKET, bucket * _BUCKET + _BUCKET):
            slot = slots_SP[sub, s]
            if slot and np.uint64(first) <= slot >> _PLACE_BITS <= np.uint64(last):
                if num == len(places_N):
                    return num + 1
                places_N[num] = np.int64((slot & _PLACE_MASK) - _ONE)
                num += 1
        is_behind |= bucket == end
        if is_behind and over_SB[sub, bucket] == 0:
            break
        bucket += _ONE
        if bucket == size:
            bucket = _ZERO
    return num
