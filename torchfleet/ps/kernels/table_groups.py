"""Kernels that handle several tables in one call: with few rows of each, a call takes longer than its work.

The rows of a table lie in a store of their own, at an address. A row number is an id divided by the number of servers,
and an id has a row if its mark is set (tables/rows/keyrange.py). Table t is described by `tables_TK[t]`:

    address of its store (float32) | address of its marks (bool) | number of ids | words of a row | numbers of a value

A request's keys and gradients lie in a frame of 64-bit words, at `frame`: those of table t begin at the words
`keys_T[t]` and `grads_T[t]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from torchfleet.ps.kernels.intrinsics import copy_words
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.merge import place_of
from torchfleet.ps.kernels.rows import adagrad, adam, largest_of, sgd

SGD, ADAGRAD, ADAM = range(3)
STORE, MARKS, SIZE, WIDTH, DIM = range(5)  # columns of tables_TK


def _array_at(kind: Any) -> Any:
    """A function for kernels: (address, number of elements) → a flat array of this type at the address."""

    @intrinsic
    def array_at(typing_context: Any, address: Any, num: Any) -> Any:
        made = types.Array(kind, 1, "C")

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(made)(context, builder)
            place = builder.inttoptr(args[0], array.data.type)
            item_size = context.get_constant(types.intp, kind.bitwidth // 8)
            populate_array(array, place, [args[1]], [item_size], item_size, meminfo=None)
            return array._getvalue()

        return made(types.int64, types.int64), codegen

    return array_at


_floats_at, _bits_at, _keys_at, _marks_at = map(_array_at, (types.float32, types.uint32, types.uint64, types.uint8))


@inlined
def _rows_of(
    keys: np.ndarray, marks: np.ndarray, size: np.uint64, shard: np.uint64, num_shards: np.uint64, rows_N: np.ndarray
) -> bool:
    """rows_N[i] = the row of keys[i]. Returns False if a key has no row here."""
    for i in range(len(keys)):
        key = keys[i]
        row = key // num_shards
        if key >= size or key - row * num_shards != shard or not marks[row]:
            return False
        rows_N[i] = np.int64(row)
    return True


@kernel
def read_tables(
    frame: int,
    keys_T: np.ndarray,
    counts_T: np.ndarray,
    tables_TK: np.ndarray,
    shard: np.uint64,
    num_shards: np.uint64,
    rows_N: np.ndarray,
    out: np.ndarray,
    outs_T: np.ndarray,
) -> bool:
    """The values of each table's rows, from out[2 * outs_T[t]] on. Returns False if a key has no row here.

    rows_N: room for the rows of one table.
    """
    for t in range(len(tables_TK)):
        num, size, width, dim = counts_T[t], tables_TK[t, SIZE], tables_TK[t, WIDTH], tables_TK[t, DIM]
        keys = _keys_at(frame + 8 * keys_T[t], num)
        marks = _marks_at(tables_TK[t, MARKS], size)
        if not _rows_of(keys, marks, np.uint64(size), shard, num_shards, rows_N):
            return False
        store = _floats_at(tables_TK[t, STORE], size * width)
        to = 2 * outs_T[t]
        if num * dim % 2:
            out[to + num * dim] = 0
        for i in range(num):
            copy_words(out, to + i * dim, store, rows_N[i] * width, dim)
    return True


@kernel
def check_tables(
    frame: int,
    keys_T: np.ndarray,
    grads_T: np.ndarray,
    counts_T: np.ndarray,
    tables_TK: np.ndarray,
    shard: np.uint64,
    num_shards: np.uint64,
    places_P: np.ndarray,
    salt: np.uint64,
    rows_N: np.ndarray,
    largest_T: np.ndarray,
) -> bool:
    """Find the rows of a push, those of all tables one after the other, and each table's largest gradient.

    Returns False if a key has no row here, or is in a table's keys twice. places_P: a power of two, at least twice as
    long as the keys of a table.
    """
    first = 0
    for t in range(len(tables_TK)):
        num, size, dim = counts_T[t], tables_TK[t, SIZE], tables_TK[t, DIM]
        keys = _keys_at(frame + 8 * keys_T[t], num)
        marks = _marks_at(tables_TK[t, MARKS], size)
        if not _rows_of(keys, marks, np.uint64(size), shard, num_shards, rows_N[first : first + num]):
            return False
        places_P[:] = 0
        for i in range(num):
            at = place_of(keys[i], salt, places_P, keys)
            if places_P[at] != 0:
                return False
            places_P[at] = i + 1
        largest_T[t] = largest_of(_bits_at(frame + 8 * grads_T[t], num * dim))
        first += num
    return True


@kernel
def update_tables(
    rule: int,
    frame: int,
    grads_T: np.ndarray,
    counts_T: np.ndarray,
    tables_TK: np.ndarray,
    rows_N: np.ndarray,
    rates_T: np.ndarray,
    steps_T: np.ndarray,
    settings: np.ndarray,
) -> np.uint64:
    """Apply a rule of kernels/rows.py to the rows that `check_tables` found. `settings`: eps, beta1, beta2, low and
    high.
    """
    first, fetched = 0, np.uint64(0)
    eps, beta1, beta2, low, high = settings[0], settings[1], settings[2], settings[3], settings[4]
    for t in range(len(tables_TK)):
        num, width, dim = counts_T[t], tables_TK[t, WIDTH], tables_TK[t, DIM]
        store = _floats_at(tables_TK[t, STORE], tables_TK[t, SIZE] * width)
        grads = _floats_at(frame + 8 * grads_T[t], num * dim).reshape(num, dim)
        rows = rows_N[first : first + num]
        if rule == SGD:
            fetched ^= sgd(store, width, 0, rows, grads, rates_T[t], low, high)
        elif rule == ADAGRAD:
            fetched ^= adagrad(store, width, 0, rows, grads, rates_T[t], eps, low, high)
        else:
            fetched ^= adam(store, width, 0, rows, grads, rates_T[t], beta1, beta2, eps, steps_T[t], low, high)
        first += num
    return fetched


@kernel
def are_keys_at(address: int, keys_N: np.ndarray, first: int, last: int) -> bool:
    """Whether the 64-bit numbers from this address on are keys_N[first:last]."""
    found = _keys_at(address, last - first)
    is_equal = True
    for i in range(last - first):
        is_equal &= found[i] == keys_N[first + i]
    return is_equal


@kernel
def put_pairs(
    keys_U: np.ndarray,
    grads: np.ndarray,
    counts_T: np.ndarray,
    dims_T: np.ndarray,
    words: np.ndarray,
    keys_T: np.ndarray,
    grads_T: np.ndarray,
) -> None:
    """Write the keys and gradients of several tables, which lie one after the other, to their places in a frame."""
    key, grad, floats = 0, 0, words.view(np.float32)
    for t in range(len(counts_T)):
        for i in range(counts_T[t]):
            words[keys_T[t] + i] = keys_U[key + i]
        num = counts_T[t] * dims_T[t]
        if num % 2:
            floats[2 * grads_T[t] + num] = 0
        copy_words(floats, 2 * grads_T[t], grads, grad, num)
        key, grad = key + counts_T[t], grad + num
