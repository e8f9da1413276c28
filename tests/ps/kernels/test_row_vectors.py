"""Arithmetic on rows in vectors, against numpy, bit for bit: any size, any position, and nothing beside the row."""

from __future__ import annotations

import numba as nb
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support import twins

from torchfleet.ps.kernels import row_vectors

SIZES = st.integers(0, 70)
PLACES = st.integers(0, 9)


@nb.njit
def copy(to, to_at, source, source_at, size):
    row_vectors.copy_row(to, to_at, source, source_at, size)


@nb.njit
def subtract(to, to_at, source, source_at, size, factor):
    row_vectors.subtract_scaled(to, to_at, source, source_at, size, factor)


@nb.njit
def squares(source, source_at, size):
    return row_vectors.sum_of_squares(source, source_at, size)


@nb.njit
def sum_and_add(out, to, rows, index, size, sums, factor):
    row_vectors.sum_rows(out, to, rows, index, 0, len(index), size)
    row_vectors.add_to_rows(sums, index, 0, len(index), rows, 0, factor, size)


@given(SIZES, PLACES, PLACES, st.integers(0, 2**32 - 1))
def test_a_row_is_copied_and_subtracted(size: int, to_at: int, source_at: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, to = rng.standard_normal(90).astype(np.float32), rng.standard_normal(90).astype(np.float32)
    words, row = to.view(np.uint32).copy(), source[source_at : source_at + size]
    expected = words.copy()
    expected[to_at : to_at + size] = row.view(np.uint32)
    copy(words, to_at, source.view(np.uint32), source_at, size)
    assert np.array_equal(words, expected)
    changed, factor = to.copy(), np.float32(0.3)
    changed[to_at : to_at + size] -= factor * row
    subtract(to, to_at, source, source_at, size, factor)
    assert twins.same_bits(to, changed)
    if size:
        assert np.float32(squares(source, source_at, size)) / np.float32(size) == twins.mean_square(row[None])[0, 0]


@given(st.integers(1, 70), st.lists(st.integers(0, 4), max_size=6), PLACES)
def test_rows_are_summed_and_added_to(size: int, chosen: list[int], to: int) -> None:
    rng = np.random.default_rng(size)
    rows, sums = rng.standard_normal((5, size)).astype(np.float32), rng.standard_normal((5, size)).astype(np.float32)
    out, index, factor = np.full(90, np.nan, np.float32), np.array(chosen, np.int32), np.float32(0.7)
    expected, total = sums.copy(), np.zeros(size, np.float32)
    for row in chosen:
        total += rows[row]
        expected[row] += factor * rows[0]
    sum_and_add(out, to, rows.reshape(-1), index, size, sums.reshape(-1), factor)
    assert np.array_equal(out[to : to + size], total)
    assert np.isnan(out[:to]).all()
    assert np.isnan(out[to + size :]).all()
    assert twins.same_bits(sums, expected)
