"""Collects rows of words, in any order, into a batch: the values of each slot are contiguous."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import copy_words
from torchfleet.ps.kernels.jit import inlined, kernel

_U1, _U2 = np.uint64(1), np.uint64(2)


@kernel
def count_values(
    words_W: np.ndarray,
    starts_N: np.ndarray,
    index_I: np.ndarray,
    dims_S: np.ndarray,
    sizes_S: np.ndarray,
    counts_S: np.ndarray,
) -> None:
    """Add the number of values of each slot in the rows index_I to counts_S. sizes_S: words per value."""
    for i in range(len(index_I)):
        at = np.uint64(starts_N[index_I[i]])
        for slot in range(len(dims_S)):
            count = dims_S[slot]
            if count < 0:
                count = np.int64(words_W[at])
                at += _U1
            counts_S[slot] += count
            at += np.uint64(count * sizes_S[slot])


@kernel
def fill(
    words_W: np.ndarray,
    starts_N: np.ndarray,
    index_I: np.ndarray,
    dims_S: np.ndarray,
    sizes_S: np.ndarray,
    slots_of_offsets_S: np.ndarray,
    ats_S: np.ndarray,
    out_V: np.ndarray,
    first: int,
    firsts_S: np.ndarray,
    offsets_RB: np.ndarray,
) -> None:
    """Copy the rows' values to out_V, slot s at word ats_S[s], which advances; records where each sample begins.

    Sample `first + i` is row index_I[i]. slots_of_offsets_S: the slot's row in offsets_RB, or -1. firsts_S: where the
    slot's values begin in out_V.
    """
    for i in range(len(index_I)):
        at = np.uint64(starts_N[index_I[i]])
        for slot in range(len(dims_S)):
            count = dims_S[slot]
            shift = np.uint64(sizes_S[slot] - 1)  # a value is one word or two
            to = np.uint64(ats_S[slot])
            if count < 0:
                count = np.int64(words_W[at])
                at += _U1
                offsets_RB[slots_of_offsets_S[slot], first + i] = (to - np.uint64(firsts_S[slot])) >> shift
            num = np.uint64(count) << shift
            for k in range(num):
                out_V[to + k] = words_W[at + k]
            ats_S[slot] = to + num
            at += num


@kernel
def put_slot(
    values_V: np.ndarray, bounds_N: np.ndarray, is_counted: bool, size: int, ats_N: np.ndarray, out_W: np.ndarray
) -> None:
    """Copy words bounds_N[i] to bounds_N[i + 1] of a slot's values to word ats_N[i] of out_W, which advances.

    is_counted: the number of values precedes them. size: words per value.
    """
    for i in range(len(ats_N)):
        num = bounds_N[i + 1] - bounds_N[i]
        to = ats_N[i]
        if is_counted:
            out_W[to] = np.uint32(num // size)
            to += 1
        for k in range(num):
            out_W[to + k] = values_V[bounds_N[i] + k]
        ats_N[i] = to + num


@kernel
def gather_rows(
    words_W: np.ndarray, starts_N: np.ndarray, index_I: np.ndarray, out_V: np.ndarray, out_starts_I: np.ndarray
) -> None:
    """Copy the rows index_I one after the other; out_starts_I (one longer) gets where each begins."""
    to = 0
    for i in range(len(index_I)):
        row = index_I[i]
        num = starts_N[row + 1] - starts_N[row]
        out_starts_I[i] = to
        copy_words(out_V, to, words_W, starts_N[row], num)
        to += num
    out_starts_I[len(index_I)] = to


@kernel
def total_words(starts_N: np.ndarray, index_I: np.ndarray) -> int:
    total = 0
    for i in range(len(index_I)):
        total += starts_N[index_I[i] + 1] - starts_N[index_I[i]]
    return total


@inlined
def slot_place(
    words_W: np.ndarray, row_at: np.intp, slot: np.intp, dims_S: np.ndarray, sizes_S: np.ndarray
) -> tuple[np.intp, np.intp]:
    """(first word, number of words) of a slot in a row, its count included."""
    at = row_at
    for s in range(slot):
        count = dims_S[s]
        if count < 0:
            count = np.int64(words_W[at])
            at += 1
        at += count * sizes_S[s]
    count = dims_S[slot]
    if count < 0:
        return at, 1 + np.int64(words_W[at]) * sizes_S[slot]
    return at, count * sizes_S[slot]


@kernel
def swap_slot(
    words_W: np.ndarray,
    starts_N: np.ndarray,
    index_I: np.ndarray,
    donors_I: np.ndarray,
    slot: int,
    dims_S: np.ndarray,
    sizes_S: np.ndarray,
    out_V: np.ndarray,
    out_starts_I: np.ndarray,
) -> None:
    """As gather_rows, but sample i gets its values of `slot` from row donors_I[i]. Totals stay the same."""
    to = 0
    for i in range(len(index_I)):
        row = starts_N[index_I[i]]
        num = starts_N[index_I[i] + 1] - row
        at, size = slot_place(words_W, row, slot, dims_S, sizes_S)
        donor_at, donor_size = slot_place(words_W, starts_N[donors_I[i]], slot, dims_S, sizes_S)
        out_starts_I[i] = to
        copy_words(out_V, to, words_W, row, at - row)
        to += at - row
        copy_words(out_V, to, words_W, donor_at, donor_size)
        to += donor_size
        rest = row + num - (at + size)
        copy_words(out_V, to, words_W, at + size, rest)
        to += rest
    out_starts_I[len(index_I)] = to


@kernel
def are_whole(words_W: np.ndarray, starts_N: np.ndarray, dims_S: np.ndarray, sizes_S: np.ndarray) -> bool:
    """Whether every row is exactly as long as its counts say: for rows from an untrusted source."""
    if len(starts_N) == 0 or starts_N[0] != 0 or starts_N[len(starts_N) - 1] != len(words_W):
        return False
    for i in range(len(starts_N) - 1):
        at, end = starts_N[i], starts_N[i + 1]
        if end < at or end > len(words_W):
            return False
        for slot in range(len(dims_S)):
            count = dims_S[slot]
            if count < 0:
                if at >= end:
                    return False
                count = np.int64(words_W[at])
                at += 1
            at += count * sizes_S[slot]
            if at > end:
                return False
        if at != end:
            return False
    return True
