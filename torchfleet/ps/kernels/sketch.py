"""Appearances of keys within a sliding window of time, in fixed memory: a count-min sketch in blocks of a cache line.

A block is 16 words of 32 bits: the number of the newest pane of time that it has seen, then 15 positions of four
counters of one byte, those of the panes p, p - 1, p - 2 and p - 3; pane p is byte p % 4 of a position's word. A key has
one block, by the hash that also decides its owner, and three distinct positions in it, by another hash.

Invariant of every pane: each of a key's three counters is at least the number of its appearances in that pane. An
appearance raises only the least of the three counters, or several equal ones, which keeps this true. So the sum over
panes of the least counter is never below the number of appearances in the window, as long as no counter has reached
255. (Comparing sums over the window instead would be wrong: if a sum is large because of other keys in an old pane, the
appearance would not be noted, and would be missing when that pane is over.)
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import mix, owner_hash
from torchfleet.ps.kernels.jit import inlined, kernel

NUM_WORDS = 16  # of a block
NUM_POSITIONS = 15
NUM_PANES = 4
FULL = 255
BATCH = 64  # keys whose blocks are prefetched together

_POSITION_SALT = np.uint64(0xBB67AE8584CAA73B)
_U0, _U1, _U3, _S3, _S32 = np.uint64(0), np.uint64(1), np.uint64(3), np.uint64(3), np.uint64(32)
_BYTE, _ALL, _FIELD = np.uint64(0xFF), np.uint64(0xFFFFFFFF), np.uint64(0xFFFFF)
_FULL = np.uint64(FULL)


@kernel
def locate(keys_N: np.ndarray, num_blocks: int, first: int, num: int, blocks_N: np.ndarray) -> int:
    """blocks_N[i] = the key's block among the `num` from `first` on; returns how many keys belong elsewhere."""
    num_outside = 0
    for i in range(len(keys_N)):
        block = np.int64((owner_hash(keys_N[i]) * np.uint64(num_blocks)) >> _S32) - first
        num_outside += block < 0 or block >= num
        blocks_N[i] = block
    return num_outside


@inlined
def _share(bits: np.uint64, num: int) -> np.uint64:
    """An index below `num`, from the lowest 20 bits."""
    return ((bits & _FIELD) * np.uint64(num)) >> np.uint64(20)


@inlined
def _positions(key: np.uint64) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Three distinct words of a block, 1 to 15: all triples are equally likely."""
    bits = mix(key ^ _POSITION_SALT)
    a = _share(bits, NUM_POSITIONS)
    b = _share(bits >> np.uint64(20), NUM_POSITIONS - 1)
    b += _U1 if b >= a else _U0
    c = _share(bits >> np.uint64(40), NUM_POSITIONS - 2)
    c += _U1 if c >= min(a, b) else _U0
    c += _U1 if c >= max(a, b) else _U0
    return a + _U1, b + _U1, c + _U1


@inlined
def _advance(words_BW: np.ndarray, block: int, pane: np.uint64) -> np.uint64:
    """Clear the counters of expired panes. Returns the block's newest pane, which is later if the clock went back."""
    newest = np.uint64(words_BW[block, 0])
    if pane <= newest:
        return newest
    keep = _ALL
    for step in range(min(np.int64(pane - newest), NUM_PANES)):
        keep &= ~(_BYTE << (((newest + _U1 + np.uint64(step)) & _U3) << _S3))
    for word in range(1, NUM_WORDS):
        words_BW[block, word] &= np.uint32(keep)
    words_BW[block, 0] = np.uint32(pane)
    return pane


@inlined
def _counter(word: np.uint64, pane: np.uint64) -> np.uint64:
    return (word >> ((pane & _U3) << _S3)) & _BYTE


@inlined
def _least(x: np.uint64, y: np.uint64, z: np.uint64, pane: np.uint64) -> np.uint64:
    return min(_counter(x, pane), _counter(y, pane), _counter(z, pane))


@inlined
def _appear(words_W: np.ndarray, key: np.uint64, pane: np.uint64) -> np.int64:
    """Count one appearance in a block's newest pane. Returns the number in the window, this one included."""
    a, b, c = _positions(key)
    x, y, z = np.uint64(words_W[a]), np.uint64(words_W[b]), np.uint64(words_W[c])
    least = _least(x, y, z, pane)
    total = least
    for back in range(1, NUM_PANES):
        total += _least(x, y, z, pane + np.uint64(back))
    if least == _FULL:
        return np.int64(total)
    one = _U1 << ((pane & _U3) << _S3)
    words_W[a] = np.uint32(x + (one if _counter(x, pane) == least else _U0))
    words_W[b] = np.uint32(y + (one if _counter(y, pane) == least else _U0))
    words_W[c] = np.uint32(z + (one if _counter(z, pane) == least else _U0))
    return np.int64(total + _U1)


@kernel
def count(words_BW: np.ndarray, keys_N: np.ndarray, blocks_N: np.ndarray, pane: int, counts_N: np.ndarray) -> int:
    """counts_N[i] = appearances of keys_N[i] in the window, this one included; all are counted, in order.

    The return value only keeps the prefetches from being optimized away.
    """
    fetched = np.uint32(0)
    for start in range(0, len(keys_N), BATCH):
        stop = min(start + BATCH, len(keys_N))
        for i in range(start, stop):
            fetched ^= words_BW[blocks_N[i], 0]
        for i in range(start, stop):
            newest = _advance(words_BW, blocks_N[i], np.uint64(pane))
            counts_N[i] = _appear(words_BW[blocks_N[i]], keys_N[i], newest)
    return np.int64(fetched)


@kernel
def absorb(words_BW: np.ndarray, others_BW: np.ndarray) -> None:
    """Set every counter to the larger of the two of the same pane; panes that expired by the newer block are cleared.

    All appearances of a key were counted in one of the two blocks, so the larger counter is not below their number.
    Changes both arrays.
    """
    for block in range(len(words_BW)):
        newest = _advance(words_BW, block, np.uint64(others_BW[block, 0]))
        _advance(others_BW, block, newest)
        for word in range(1, NUM_WORDS):
            ours, theirs, larger = np.uint64(words_BW[block, word]), np.uint64(others_BW[block, word]), _U0
            for pane in range(NUM_PANES):
                p = np.uint64(pane)
                larger |= max(_counter(ours, p), _counter(theirs, p)) << (p << _S3)
            words_BW[block, word] = np.uint32(larger)
