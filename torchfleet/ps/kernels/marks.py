"""Sets of row numbers: row r is bit r & 63 of words_W[r >> 6].

pages_P[r >> 15] is nonzero if any of a page's 512 words may be: readers skip the other pages, and so do not touch
memory that was never written.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import trailing_zeros
from torchfleet.ps.kernels.jit import inlined, kernel

PAGE_WORDS = 512  # 4 KB
PAGE_ROWS = 64 * PAGE_WORDS

_U0, _U1, _U63, _ALL = np.uint64(0), np.uint64(1), np.uint64(63), np.uint64(0xFFFFFFFFFFFFFFFF)
_WORD, _PAGE = np.uint64(6), np.uint64(15)  # shifts


@kernel
def mark(words_W: np.ndarray, pages_P: np.ndarray, max_rows: int, rows_N: np.ndarray) -> int:
    """Add rows_N. Ignores negative numbers, and numbers from `max_rows` on, whose count is returned."""
    end, num_beyond = np.uint64(max_rows), 0
    for i in range(len(rows_N)):
        row = np.uint64(rows_N[i])
        if row < end:  # a negative number is a very large one here
            words_W[row >> _WORD] |= _U1 << (row & _U63)
            pages_P[row >> _PAGE] = 1
        else:
            num_beyond += rows_N[i] >= 0
    return num_beyond


@inlined
def _bits(words_W: np.ndarray, pages_P: np.ndarray, word: int, start: int, stop: int) -> np.uint64:
    """The word's bits of rows in start..stop. The caller passes only words that overlap the range."""
    if pages_P[word // PAGE_WORDS] == 0:
        return _U0
    bits = words_W[word]
    if start > word * 64:
        bits &= _ALL << np.uint64(start - word * 64)
    if stop < word * 64 + 64:
        bits &= _ALL >> np.uint64(word * 64 + 64 - stop)
    return bits


@kernel
def count(words_W: np.ndarray, pages_P: np.ndarray, start: int, stop: int) -> int:
    """How many row numbers in start..stop are in the set; start < stop."""
    num = 0
    for word in range(start >> 6, (stop + 63) >> 6):
        bits = _bits(words_W, pages_P, word, start, stop)
        while bits != _U0:
            bits &= bits - _U1
            num += 1
    return num


@kernel
def collect(words_W: np.ndarray, pages_P: np.ndarray, start: int, stop: int, rows_N: np.ndarray) -> None:
    """The row numbers in start..stop that are in the set, ascending."""
    num = 0
    for word in range(start >> 6, (stop + 63) >> 6):
        bits = _bits(words_W, pages_P, word, start, stop)
        while bits != _U0:
            rows_N[num] = word * 64 + np.int64(trailing_zeros(bits))
            bits &= bits - _U1
            num += 1


@kernel
def unite(words_W: np.ndarray, pages_P: np.ndarray, other_words_W: np.ndarray, other_pages_P: np.ndarray) -> None:
    """Add all rows of the other set."""
    for page in range(len(other_pages_P)):
        if other_pages_P[page] != 0:
            pages_P[page] = 1
            for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
                words_W[word] |= other_words_W[word]


@kernel
def add(words_W: np.ndarray, pages_P: np.ndarray, rows_N: np.ndarray) -> tuple[int, int]:
    """Add rows_N: (how many were not in the set, how many are beyond the end of words_W, and are not added).

    Ignores negative numbers.
    """
    end, num_new, num_beyond = np.uint64(64 * len(words_W)), 0, 0
    for i in range(len(rows_N)):
        row = np.uint64(rows_N[i])
        if row < end:  # a negative number is a very large one here
            bit, before = _U1 << (row & _U63), words_W[row >> _WORD]
            num_new += (before & bit) == _U0
            words_W[row >> _WORD] = before | bit
            pages_P[row >> _PAGE] = 1
        else:
            num_beyond += rows_N[i] >= 0
    return num_new, num_beyond


@kernel
def take(words_W: np.ndarray, pages_P: np.ndarray, start: int, rows_N: np.ndarray) -> int:
    """Take rows from `start` on out of the set, ascending, until rows_N is full; returns how many."""
    num = 0
    for page in range(start // PAGE_ROWS, len(pages_P)):
        if pages_P[page] == 0:
            continue
        left = _U0
        for word in range(page * PAGE_WORDS, (page + 1) * PAGE_WORDS):
            bits = words_W[word]
            below = _U0  # rows before `start`, which stay
            if start >= word * 64 + 64:
                below = bits
            elif start > word * 64:
                below = bits & ~(_ALL << np.uint64(start - word * 64))
            bits ^= below
            while bits != _U0 and num < len(rows_N):
                rows_N[num] = word * 64 + np.int64(trailing_zeros(bits))
                bits &= bits - _U1
                num += 1
            words_W[word] = bits | below
            left |= bits | below
            if num == len(rows_N):
                return num
        if left == _U0:
            pages_P[page] = 0
    return num
