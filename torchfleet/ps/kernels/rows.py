"""Rows of a store: copy them out and in, and apply an optimizer's rule to them.

A store is one flat float32 array of rows of `width` words: `offset` words for the key (2, or 0 where the row number
is the key), the value (`dim`), then the rule's state (0, dim or 2 dim). `rows_N` are row numbers, all different in
the functions that write. `low` and `high` bound the value after an update (-inf, inf: no bounds).

The rules take rows in blocks, and prefetch all rows of a block before they change the first of them. Their return value
only keeps the prefetches from being optimised away.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import copy_words
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.row_vectors import subtract_scaled

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_EXPONENT, _ONE_MORE, _SIGN = np.uint32(0x7F800000), np.uint32(0x00800000), np.uint32(31)
_U0, _U1, _U6, _U63 = np.uint64(0), np.uint64(1), np.uint64(6), np.uint64(63)
_LINE = np.uint64(16)  # words in a cache line
BLOCK = 32  # rows prefetched together, before the first of them is updated


@kernel
def all_finite(bits_N: np.ndarray) -> bool:
    """Whether float32 numbers, given as their bits, have no NaN and no infinity, whose exponents are all ones.

    Adding one to such an exponent overflows into the sign. Sums of 32 bits, to fill the vectors.
    """
    num = np.uint32(0)
    for i in range(len(bits_N)):
        num = np.uint32(num + (np.uint32((bits_N[i] & _EXPONENT) + _ONE_MORE) >> _SIGN))
    return num == 0


@kernel
def largest_of(bits_N: np.ndarray) -> float:
    """The largest magnitude among float32 numbers, given as their bits: without signs, bits are ordered like the
    numbers, and infinity and NaN come last.
    """
    most = np.uint32(0)
    for i in range(len(bits_N)):
        most = max(most, np.uint32(bits_N[i] & _MAGNITUDE))
    found = np.uint32(most)  # whose bits are looked at as a float's: numba does so for what is assigned once
    return found.view(np.float32)


def largest(values: np.ndarray) -> float:
    """The largest magnitude in a block of float32 numbers; infinity or NaN if the block has such a number."""
    return largest_of(values.reshape(-1).view(np.uint32))


@kernel
def all_distinct(rows_N: np.ndarray, bits: np.ndarray) -> bool:
    """Whether no row repeats. `bits` has one bit per row; all are 0 on entry and on return."""
    repeated = _U0
    for i in range(len(rows_N)):
        row = np.uint64(rows_N[i])
        bit = _U1 << (row & _U63)
        repeated |= bits[row >> _U6] & bit
        bits[row >> _U6] |= bit
    for i in range(len(rows_N)):
        bits[np.uint64(rows_N[i]) >> _U6] = _U0
    return repeated == _U0


@inlined
def fetch_rows(words: np.ndarray, width: int, rows_N: np.ndarray, num_words: int) -> np.uint64:
    """Prefetch the first `num_words` words of these rows; the caller must use the result.

    A missing row (negative) counts as the first.
    """
    fetched = _U0
    for i in range(len(rows_N)):
        row = np.uint64(max(rows_N[i], 0) * width)
        for line in range(_U0, np.uint64(num_words - 1), _LINE):
            fetched ^= np.uint64(words[row + line])
        fetched ^= np.uint64(words[row + np.uint64(num_words - 1)])
    return fetched


@kernel
def gather(store: np.ndarray, width: int, offset: int, rows_N: np.ndarray, out_NC: np.ndarray) -> None:
    """out_NC[i] = the first C words behind `offset` of row rows_N[i]; zeros if the row is missing (negative)."""
    num, num_words = out_NC.shape
    for i in range(num):
        if rows_N[i] >= 0:
            copy_words(out_NC, i * num_words, store, rows_N[i] * width + offset, num_words)
        else:
            out_NC[i, :] = 0


@kernel
def scatter(store: np.ndarray, width: int, offset: int, rows_N: np.ndarray, values_NC: np.ndarray) -> None:
    """The inverse of gather: writes the first C words behind `offset` of every row."""
    num, num_words = values_NC.shape
    for i in range(num):
        copy_words(store, rows_N[i] * width + offset, values_NC, i * num_words, num_words)


@kernel
def add_decay(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    decay: float,
    out_ND: np.ndarray,
) -> None:
    """out ← g + decay w: the gradient of a loss with decay / 2 · |w|² added for these rows."""
    num, dim = grads_ND.shape
    factor = np.float32(decay)
    for i in range(num):
        w = rows_N[i] * width + offset
        for d in range(dim):
            out_ND[i, d] = grads_ND[i, d] + factor * store[w + d]


@kernel
def shrink(store: np.ndarray, width: int, offset: int, rows_N: np.ndarray, dim: int, factor: float) -> None:
    """w ← factor w"""
    shrunk = np.float32(factor)
    for i in range(len(rows_N)):
        w = rows_N[i] * width + offset
        for d in range(dim):
            store[w + d] *= shrunk


@inlined
def bound(store: np.ndarray, w: np.uint64, dim: np.uint64, low: np.float32, high: np.float32) -> None:
    """Bound the values of a row, in a loop of its own: inside an update it would take as long as the update."""
    if low > -np.inf or high < np.inf:
        for d in range(dim):
            store[w + d] = min(max(store[w + d], low), high)


@kernel
def sgd(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    lr: float,
    low: float,
    high: float,
) -> np.uint64:
    """w ← w - lr g"""
    dim = np.uint64(grads_ND.shape[1])
    grads, bits = grads_ND.reshape(-1), store.view(np.uint32)
    rate, low, high = np.float32(lr), np.float32(low), np.float32(high)
    num_words, fetched = offset + np.int64(dim), _U0
    for start in range(0, len(rows_N), BLOCK):
        stop = min(start + BLOCK, len(rows_N))
        fetched ^= fetch_rows(bits, width, rows_N[start:stop], num_words)
        for i in range(start, stop):
            w, at = np.uint64(rows_N[i] * width + offset), np.uint64(i) * dim
            subtract_scaled(store, w, grads, at, dim, rate)
            bound(store, w, dim, low, high)
    return fetched


@kernel
def adagrad(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    lr: float,
    eps: float,
    low: float,
    high: float,
) -> np.uint64:
    """s ← s + g²;  w ← w - lr g / (√s + eps)"""
    dim = np.uint64(grads_ND.shape[1])
    grads, bits = grads_ND.reshape(-1), store.view(np.uint32)
    rate, eps, low, high = np.float32(lr), np.float32(eps), np.float32(low), np.float32(high)
    num_words, fetched = offset + 2 * np.int64(dim), _U0
    for start in range(0, len(rows_N), BLOCK):
        stop = min(start + BLOCK, len(rows_N))
        fetched ^= fetch_rows(bits, width, rows_N[start:stop], num_words)
        for i in range(start, stop):
            w, at = np.uint64(rows_N[i] * width + offset), np.uint64(i) * dim
            s = w + dim
            for d in range(dim):
                g = grads[at + d]
                total = store[s + d] + g * g
                store[s + d] = total
                store[w + d] -= rate * (g / (np.sqrt(total) + eps))
            bound(store, w, dim, low, high)
    return fetched


@kernel
def adam(
    store: np.ndarray,
    width: int,
    offset: int,
    rows_N: np.ndarray,
    grads_ND: np.ndarray,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    low: float,
    high: float,
) -> np.uint64:
    """m ← m + (1 - β1)(g - m);  v ← v + (1 - β2)(g² - v);  w ← w - lr √(1 - β2^t) / (1 - β1^t) · m / (√v + eps)

    Only the given rows move, t counts the table's updates: the formula of torch.optim.SparseAdam.
    """
    dim = np.uint64(grads_ND.shape[1])
    grads, bits = grads_ND.reshape(-1), store.view(np.uint32)
    rate = np.float32(lr * np.sqrt(1.0 - beta2**step) / (1.0 - beta1**step))
    one_less1, one_less2, eps = np.float32(1.0 - beta1), np.float32(1.0 - beta2), np.float32(eps)
    low, high = np.float32(low), np.float32(high)
    num_words, fetched = offset + 3 * np.int64(dim), _U0
    for start in range(0, len(rows_N), BLOCK):
        stop = min(start + BLOCK, len(rows_N))
        fetched ^= fetch_rows(bits, width, rows_N[start:stop], num_words)
        for i in range(start, stop):
            w, at = np.uint64(rows_N[i] * width + offset), np.uint64(i) * dim
            m, v = w + dim, w + dim + dim
            for d in range(dim):
                g = grads[at + d]
                mean = store[m + d] + (g - store[m + d]) * one_less1
                square = store[v + d] + (g * g - store[v + d]) * one_less2
                store[m + d], store[v + d] = mean, square
                store[w + d] -= rate * (mean / (np.sqrt(square) + eps))
            bound(store, w, dim, low, high)
    return fetched
