"""Map from any 64-bit key to a row number, in flat arrays: buckets of eight slots, one cache line each.

A slot is one uint64, `tag << 32 | row + 1`, and 0 when empty. The tag is the high half of the key's hash and also
decides the home bucket, `tag * num_buckets >> 32`, so that

- buckets are in hash order, and a larger map is filled by one sequential walk over the smaller one;
- the key itself is stored only once, in the first two words of its row, which a lookup is about to touch anyway.

A bucket is filled from its front; a key whose home is full is stored in the next bucket that is not. Invariant: every
bucket between a key's home and the bucket that holds it is full. So a search ends at the first bucket with an empty
last slot. Spare buckets behind the last home make it a straight walk without wrap-around. There are enough of them for
all keys of the map (tables/rows/keymap.py), so that there is room whatever the keys are.

While a map grows there are two slot arrays. Home buckets of the old array below `moved` have been moved, so one
comparison tells which array holds a key; no lookup searches both.

The hash depends on a secret of the map, so that a client that chooses keys cannot make them collide.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import scramble, secret_at
from torchfleet.ps.kernels.intrinsics import copy_words
from torchfleet.ps.kernels.jit import inlined, kernel

MISSING = -1
BUCKET = 8  # slots, one cache line
BLOCK = 64  # keys whose memory is prefetched together; 64 to 256 perform alike, see benchmarks/log.md
NUM_KEYS, NEXT_ROW, NUM_FREE, MOVED, FETCHED, SECRET = range(6)  # places in a map's `state`; the secret is the last
OLD, NEW = 0, 1  # places in a map's `num_buckets`

_U0, _U1, _U8, _LAST = np.uint64(0), np.uint64(1), np.uint64(BUCKET), np.uint64(BUCKET - 1)
_S32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@inlined
def tag_of(key: np.uint64, secret: tuple[np.uint64, ...]) -> np.uint64:
    return scramble(key, secret) >> _S32


@inlined
def key_at(words_RW: np.ndarray, row: np.uint64) -> np.uint64:
    return np.uint64(words_RW[row, 0]) | (np.uint64(words_RW[row, 1]) << _S32)


@inlined
def home_of(tag: np.uint64, num_buckets: np.uint64) -> np.uint64:
    return (tag * num_buckets) >> _S32


@inlined
def _match(slots: np.ndarray, at: np.uint64, tag: np.uint64) -> np.uint64:
    """A slot of the bucket at `at` with this tag, or 0; without a branch that could be mispredicted."""
    found = _U0
    for j in range(BUCKET):
        slot = slots[at + np.uint64(j)]
        found = max(found, slot if (slot >> _S32) == tag else _U0)
    return found


@inlined
def first_match(slots: np.ndarray, home: np.uint64, tag: np.uint64) -> np.uint64:
    at = home * _U8
    found = _match(slots, at, tag)
    while found == _U0 and slots[at + _LAST] != _U0:
        at += _U8
        found = _match(slots, at, tag)
    return found


@inlined
def _vacancy(slots: np.ndarray, home: np.uint64) -> np.uint64:
    """The first empty slot from the home bucket on; computed by counting, so that little is mispredicted."""
    at = home * _U8
    while slots[at + _LAST] != _U0:
        at += _U8
    num_taken = _U0
    for j in range(BUCKET):
        num_taken += _U1 if slots[at + np.uint64(j)] != _U0 else _U0
    return at + num_taken


@kernel
def place_of(slots: np.ndarray, words_RW: np.ndarray, key: np.uint64, tag: np.uint64, home: np.uint64) -> np.uint64:
    """The slot that holds `key`, otherwise the empty slot where it belongs. The exact search behind `first_match`."""
    at = home * _U8
    while slots[at] != _U0 and ((slots[at] >> _S32) != tag or key_at(words_RW, (slots[at] & _LOW) - _U1) != key):
        at += _U1
    return at


@inlined
def _place_missing(
    slots: np.ndarray, words_RW: np.ndarray, key: np.uint64, tag: np.uint64, home: np.uint64
) -> np.uint64:
    """`place_of` for a key that is missing, unless it came earlier in the same batch."""
    if first_match(slots, home, tag) != _U0:
        return place_of(slots, words_RW, key, tag, home)
    return _vacancy(slots, home)


@inlined
def _fetch(slots: np.ndarray, keys_N: np.ndarray, secret: tuple[np.uint64, ...], num_buckets: np.uint64) -> np.uint64:
    """Prefetch the home buckets of these keys; the caller must use the result."""
    fetched = _U0
    for i in range(len(keys_N)):
        fetched ^= slots[home_of(tag_of(keys_N[i], secret), num_buckets) * _U8]
    return fetched


@kernel
def insert_missing(
    old: np.ndarray,
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    words_RW: np.ndarray,
    free_rows: np.ndarray,
    keys_N: np.ndarray,
    rows_N: np.ndarray,
    fresh_N: np.ndarray,
) -> int:
    """Give a row to every key whose rows_N is MISSING; fresh_N gets the positions of keys with a new row.

    Returns the number of fresh rows. Freed rows are used first. A key that repeats gets one row. The
    caller has made room for len(keys_N) more keys in the slots and the rows.
    """
    moved, secret = np.uint64(state[MOVED]), secret_at(state, SECRET)
    num_old, num_new = num_buckets[OLD], num_buckets[NEW]
    num_fresh, fetched = 0, np.uint64(0)
    for i in range(len(keys_N)):
        if i % BLOCK == 0:
            fetched ^= _fetch(new, keys_N[i : i + BLOCK], secret, num_new)
        if rows_N[i] >= 0:
            continue
        key = keys_N[i]
        tag = tag_of(key, secret)
        in_new = home_of(tag, num_old) < moved
        if in_new:
            at = _place_missing(new, words_RW, key, tag, home_of(tag, num_new))
            slot = new[at]
        else:
            at = _place_missing(old, words_RW, key, tag, home_of(tag, num_old))
            slot = old[at]
        if slot == _U0:
            if state[NUM_FREE] > 0:
                state[NUM_FREE] -= 1
                row = np.int64(free_rows[state[NUM_FREE]])
            else:
                row = state[NEXT_ROW]
                state[NEXT_ROW] += 1
            words_RW[row, 0] = np.uint32(key & _LOW)
            words_RW[row, 1] = np.uint32(key >> _S32)
            slot = (tag << _S32) | np.uint64(row + 1)
            if in_new:
                new[at] = slot
            else:
                old[at] = slot
            fresh_N[num_fresh] = i
            num_fresh += 1
        rows_N[i] = np.int64(slot & _LOW) - 1
    state[NUM_KEYS] += num_fresh
    state[FETCHED] = np.int64(fetched)
    return num_fresh


@kernel
def load(
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    words_RW: np.ndarray,
    keys_N: np.ndarray,
    values_NC: np.ndarray,
) -> int:
    """find, insert_missing and scatter in one pass, for a map that is not growing and has no freed rows.

    words_RW[row, 2:2 + C] = values_NC[i]; among equal keys the last one wins. Returns how many were new.
    """
    secret, num_new = secret_at(state, SECRET), num_buckets[NEW]
    width, num_words = np.int64(words_RW.shape[1]), np.int64(values_NC.shape[1])
    num_fresh, fetched = 0, np.uint64(0)
    for start in range(0, len(keys_N), BLOCK):
        stop = min(start + BLOCK, len(keys_N))
        fetched ^= _fetch(new, keys_N[start:stop], secret, num_new)
        for i in range(start, stop):
            key = keys_N[i]
            tag = tag_of(key, secret)
            at = _place_missing(new, words_RW, key, tag, home_of(tag, num_new))
            if new[at] == _U0:
                row = state[NEXT_ROW]
                state[NEXT_ROW] += 1
                words_RW[row, 0] = np.uint32(key & _LOW)
                words_RW[row, 1] = np.uint32(key >> _S32)
                new[at] = (tag << _S32) | np.uint64(row + 1)
                num_fresh += 1
            row = np.int64(new[at] & _LOW) - 1
            copy_words(words_RW, row * width + 2, values_NC, i * num_words, num_words)
    state[NUM_KEYS] += num_fresh
    state[FETCHED] = np.int64(fetched)
    return num_fresh


@kernel
def _close_hole(slots: np.ndarray, at: np.uint64, num_buckets: np.uint64) -> None:
    """Empty the slot `at` and restore "all buckets from a key's home to its own are full"."""
    bucket = at // _U8
    while True:
        last = bucket * _U8 + _LAST
        was_full = slots[last] != _U0
        while slots[last] == _U0:
            last -= _U1
        slots[at] = slots[last]
        slots[last] = _U0
        if not was_full:
            return
        # Keys may have overflowed a full bucket: the nearest such key moves back, and its slot is the next hole.
        candidate = (bucket + _U1) * _U8
        while slots[candidate] != _U0 and home_of(slots[candidate] >> _S32, num_buckets) > bucket:
            candidate += _U1
        if slots[candidate] == _U0:
            return
        slots[last] = slots[candidate]
        at = candidate
        bucket = candidate // _U8


@kernel
def erase(
    old: np.ndarray,
    new: np.ndarray,
    num_buckets: np.ndarray,
    state: np.ndarray,
    words_RW: np.ndarray,
    free_rows: np.ndarray,
    keys_N: np.ndarray,
) -> int:
    """Remove keys and put their rows on the free list; absent keys are ignored. Returns how many were present."""
    moved, secret = np.uint64(state[MOVED]), secret_at(state, SECRET)
    num_old, num_new = num_buckets[OLD], num_buckets[NEW]
    num_erased, fetched = 0, np.uint64(0)
    for i in range(len(keys_N)):
        if i % BLOCK == 0:
            fetched ^= _fetch(new, keys_N[i : i + BLOCK], secret, num_new)
        key = keys_N[i]
        tag = tag_of(key, secret)
        if home_of(tag, num_old) < moved:
            at = place_of(new, words_RW, key, tag, home_of(tag, num_new))
            slot = new[at]
            if slot != _U0:
                _close_hole(new, at, num_new)
        else:
            at = place_of(old, words_RW, key, tag, home_of(tag, num_old))
            slot = old[at]
            if slot != _U0:
                _close_hole(old, at, num_old)
        if slot != _U0:
            free_rows[state[NUM_FREE]] = np.uint32((slot & _LOW) - _U1)
            state[NUM_FREE] += 1
            num_erased += 1
    state[NUM_KEYS] -= num_erased
    state[FETCHED] = np.int64(fetched)
    return num_erased


@kernel
def migrate(old: np.ndarray, new: np.ndarray, num_buckets: np.ndarray, state: np.ndarray, num_to_move: int) -> int:
    """Move at least `num_to_move` buckets from old to new, in order, and stop behind one that was not full.

    Returns the total number of buckets moved; if it is at least the number of old homes, no key is left in old.
    """
    num_new = num_buckets[NEW]
    bucket = state[MOVED]
    target = min(bucket + num_to_move, np.int64(num_buckets[OLD]))
    full = True
    while bucket < target or full:
        start = np.uint64(bucket) * _U8
        full = old[start + _LAST] != _U0
        for j in range(BUCKET):
            slot = old[start + np.uint64(j)]
            if slot == _U0:
                break
            new[_vacancy(new, home_of(slot >> _S32, num_new))] = slot
        bucket += 1
    state[MOVED] = bucket
    return bucket
