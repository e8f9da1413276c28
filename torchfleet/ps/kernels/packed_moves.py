"""Operations on a packed map (kernels/packed_buckets.py) that move its rows: erase and growth. Also iteration over
rows, and their marks.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import secret_at
from torchfleet.ps.kernels.hashmap import key_at
from torchfleet.ps.kernels.intrinsics import copy_words
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.packed_buckets import (
    BUCKET,
    NEW,
    NUM_KEYS,
    OLD,
    SECRET,
    UNMOVED,
    hash_of,
    home_of,
    is_full,
    num_taken,
    put_tag,
    search,
    tag_at,
    tag_of,
)

STRETCH = 64  # buckets moved together, so that their rows stay in the cache
CROWDED = -1
TOO_LONG = -1  # a run of full buckets does not fit into the buffer

_U0, _U1, _U2 = np.uint64(0), np.uint64(1), np.uint64(2)
_PLACES = np.uint64(BUCKET)
_S16 = np.uint64(16)
_BOTH = np.uint64(0x10001)  # a row's two marks


@inlined
def _marks_at(marks: np.ndarray, place: np.uint64) -> np.uint64:
    return (np.uint64(marks[place // _PLACES]) >> (place % _PLACES)) & _BOTH


@inlined
def _put_marks(marks: np.ndarray, place: np.uint64, both: np.uint64) -> None:
    """Does not touch the memory of marks that are 0 and stay 0."""
    shift, before = place % _PLACES, np.uint64(marks[place // _PLACES])
    after = (before & ~(_BOTH << shift)) | (both << shift)
    if after != before:
        marks[place // _PLACES] = np.uint32(after)


@inlined
def _copy(tags: np.ndarray, marks: np.ndarray, words_RW: np.ndarray, place: np.uint64, to: np.uint64) -> None:
    """Copy the row at `place`, with its tag and marks, to the place `to`."""
    width = np.uint64(words_RW.shape[1])
    copy_words(words_RW, to * width, words_RW, place * width, width)
    put_tag(tags, to, tag_at(tags, place))
    _put_marks(marks, to, _marks_at(marks, place))


@kernel
def _close_hole(
    tags: np.ndarray,
    marks: np.ndarray,
    words_RW: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    hole: np.uint64,
) -> None:
    """Empty the place `hole` and restore "all buckets from a key's home to its own are full"."""
    unmoved, secret = np.uint64(state[UNMOVED]), secret_at(state, SECRET)
    while True:
        bucket = hole // _PLACES
        was_full = is_full(tags, bucket)
        last = bucket * _PLACES + num_taken(tags, bucket) - _U1
        if last != hole:
            _copy(tags, marks, words_RW, last, hole)
        put_tag(tags, last, _U0)
        _put_marks(marks, last, _U0)
        if not was_full:
            return
        # Keys may have overflowed a full bucket: the nearest such key moves back, and its place is the next hole.
        found, candidate = False, (bucket + _U1) * _PLACES
        while not found and tag_at(tags, candidate) != _U0:
            hashed = hash_of(key_at(words_RW, candidate), secret)
            found = home_of(hashed, num_buckets[OLD], num_buckets[NEW], unmoved) <= bucket
            candidate += _U1
        if not found:
            return
        hole = candidate - _U1
        _copy(tags, marks, words_RW, hole, last)


@kernel
def erase(
    tags: np.ndarray,
    marks: np.ndarray,
    words_RW: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    keys_N: np.ndarray,
) -> int:
    """Remove keys; absent keys are ignored. Returns how many were present."""
    num_erased, secret = 0, secret_at(state, SECRET)
    for i in range(len(keys_N)):
        hashed = hash_of(keys_N[i], secret)
        home = home_of(hashed, num_buckets[OLD], num_buckets[NEW], np.uint64(state[UNMOVED]))
        place = search(tags, words_RW, keys_N[i], tag_of(hashed), home)
        if place >= 0:
            _close_hole(tags, marks, words_RW, num_buckets, state, np.uint64(place))
            num_erased += 1
    state[NUM_KEYS] -= num_erased
    return num_erased


@kernel
def _lift(
    tags: np.ndarray,
    marks: np.ndarray,
    words_RW: np.ndarray,
    start: np.uint64,
    stop: np.uint64,
    lifted_LW: np.ndarray,
    kept_L: np.ndarray,
) -> int:
    """Remove all rows from buckets start..stop into a buffer, with their marks; returns how many."""
    width, num = np.uint64(words_RW.shape[1]), _U0
    for bucket in range(start, stop):
        taken = num_taken(tags, bucket)
        copy_words(lifted_LW, num * width, words_RW, bucket * _PLACES * width, taken * width)
        both, marks_here = _BOTH, np.uint64(marks[bucket])
        for j in range(taken):
            kept_L[num + j] = np.uint32((marks_here >> j) & both)
        num += taken
        tags[bucket * _U2], tags[bucket * _U2 + _U1] = _U0, _U0
        if marks_here != _U0:
            marks[bucket] = 0
    return np.int64(num)


@kernel
def _put_back(
    tags: np.ndarray,
    marks: np.ndarray,
    words_RW: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    lifted_LW: np.ndarray,
    kept_L: np.ndarray,
    num: int,
) -> None:
    """Insert the first `num` lifted rows at their new homes."""
    width, num_new, secret = np.uint64(words_RW.shape[1]), num_buckets[NEW], secret_at(state, SECRET)
    tag_bytes, words, lifted = tags.view(np.uint8), words_RW.reshape(-1), lifted_LW.reshape(-1)
    for i in range(np.uint64(num)):
        hashed = hash_of(key_at(lifted_LW, i), secret)
        bucket = home_of(hashed, _U1, num_new, _U0)
        while is_full(tags, bucket):
            bucket += _U1
        place = bucket * _PLACES + num_taken(tags, bucket)
        tag_bytes[place] = np.uint8(tag_of(hashed))
        if kept_L[i] != 0:
            _put_marks(marks, place, np.uint64(kept_L[i]))
        for j in range(width):
            words[place * width + j] = lifted[i * width + j]


@kernel
def migrate(
    tags: np.ndarray,
    marks: np.ndarray,
    words_RW: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    lifted_LW: np.ndarray,
    kept_L: np.ndarray,
    num_to_move: int,
) -> int:
    """Move the keys of at least `num_to_move` old home buckets to their new homes, from the last bucket down.

    A stretch begins and ends behind a bucket that is not full, so all keys of its homes lie inside, and no others. All
    its rows are lifted out and put back. Returns the number of old homes not moved yet, or TOO_LONG if the next stretch
    does not fit into the buffers: it is not moved, and the caller makes larger buffers and calls again.
    """
    target = max(state[UNMOVED] - num_to_move, 0)
    while state[UNMOVED] > target:
        stop = np.uint64(state[UNMOVED])
        start = np.uint64(max(state[UNMOVED] - STRETCH, target))
        while start > _U0 and is_full(tags, start - _U1):
            start -= _U1
        while is_full(tags, stop - _U1):
            stop += _U1
        if (stop - start) * _PLACES > np.uint64(len(kept_L)):
            return TOO_LONG
        num = _lift(tags, marks, words_RW, start, stop, lifted_LW, kept_L)
        state[UNMOVED] = np.int64(start)
        _put_back(tags, marks, words_RW, num_buckets, state, lifted_LW, kept_L, num)
    return state[UNMOVED]


@kernel
def collect(
    tags: np.ndarray,
    marks: np.ndarray,
    words_RW: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    first: np.uint64,
    last: np.uint64,
    only_marked: bool,
    rows_N: np.ndarray,
) -> int:
    """rows_N gets the places of keys with a hash in first..last, both included; returns how many, or CROWDED: too many.

    `only_marked`: only rows that the current save must write.
    """
    unmoved, secret = np.uint64(state[UNMOVED]), secret_at(state, SECRET)
    bucket = home_of(first, num_buckets[OLD], num_buckets[NEW], unmoved)
    last_home = home_of(last, num_buckets[OLD], num_buckets[NEW], unmoved)
    num, is_more = 0, True
    while is_more:
        is_more = bucket < last_home or is_full(tags, bucket)
        taken = num_taken(tags, bucket) if not only_marked or (marks[bucket] >> _S16) != _U0 else _U0
        for place in range(bucket * _PLACES, bucket * _PLACES + taken):
            hashed = hash_of(key_at(words_RW, place), secret)
            is_chosen = not only_marked or (_marks_at(marks, place) >> _S16) != _U0
            if is_chosen and first <= hashed and hashed <= last:
                if num == len(rows_N):
                    return CROWDED
                rows_N[num] = np.int64(place)
                num += 1
        bucket += _U1
    return num


@kernel
def mark(marks: np.ndarray, rows_N: np.ndarray) -> None:
    """Mark rows as changed; negative numbers are ignored."""
    for i in range(len(rows_N)):
        if rows_N[i] >= 0:
            place = np.uint64(rows_N[i])
            marks[place // _PLACES] |= np.uint32(_U1 << (place % _PLACES))


@kernel
def begin_save(tags: np.ndarray, marks: np.ndarray, num_homes: np.uint64, keeps_last: bool) -> None:
    """Turn the marks of changes into those of the save that begins; `keeps_last`: keep those of the last save too."""
    bucket = _U0
    while bucket < num_homes or is_full(tags, bucket - _U1):  # keys behind the last home follow on full buckets
        before = np.uint64(marks[bucket])
        if before != _U0:
            after = before << _S16
            marks[bucket] = np.uint32((after | before) if keeps_last else after) & np.uint32(0xFFFF0000)
        bucket += _U1
