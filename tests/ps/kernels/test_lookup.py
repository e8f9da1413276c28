"""Lookups and their gradients, against numpy, bit for bit: any width, padding, empty bags, gaps between samples."""

from __future__ import annotations

import numpy as np
import pytest
from support.cases import each_of

from torchfleet.ps.kernels import lookup
from torchfleet.ps.kernels.lookup import NOTHING

NUM_SLOTS, NUM_SAMPLES, NUM_ROWS = 3, 40, 25
DIMS = [1, 2, 3, 4, 7, 8, 10, 15, 16, 17, 31, 32, 33, 63, 64, 100]  # a vector has 8 numbers, the widest tile 32


def bags(rng: np.random.Generator, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(index, with -1 for padding; offsets) of bags of 0 to `most` ids, or of exactly one."""
    sizes = np.ones(NUM_SLOTS * NUM_SAMPLES, np.int64) if most == 1 else rng.integers(0, most, NUM_SLOTS * NUM_SAMPLES)
    return rng.integers(-1, NUM_ROWS, sizes.sum()).astype(np.int32), np.cumsum([0, *sizes])


def plain_unpool(
    grads: np.ndarray, index: np.ndarray, offsets: np.ndarray, mean: bool
) -> tuple[np.ndarray, np.ndarray]:
    sums = np.full((NUM_ROWS, grads.shape[2]), np.nan, np.float32)
    touched = np.zeros(NUM_ROWS, np.bool_)
    for b in range(len(offsets) - 1):
        ids = index[offsets[b] : offsets[b + 1]]
        ids = ids[ids >= 0]
        given = grads[b % NUM_SAMPLES, b // NUM_SAMPLES]
        for u in ids:
            part = given * np.float32(1.0 / len(ids)) if mean and len(ids) > 1 else given
            sums[u] = sums[u] + part if touched[u] else part
            touched[u] = True
    return sums, touched


@each_of("mean", [False, True])
@each_of("most", [1, 4], ids=["one id", "many"])
@each_of("dim", DIMS)
@each_of("gap", [0, 13])
def test_unpool_sums_as_numpy_does_in_the_same_order(dim: int, most: int, mean: bool, gap: int) -> None:
    rng = np.random.default_rng(dim)
    index, offsets = bags(rng, most)
    memory = rng.standard_normal((NUM_SAMPLES, NUM_SLOTS * dim + gap)).astype(np.float32)
    memory[0, 0] = -0.0
    grads = memory[:, : NUM_SLOTS * dim].reshape(NUM_SAMPLES, NUM_SLOTS, dim)
    sums, touched = np.full((NUM_ROWS, dim), NOTHING), np.zeros(NUM_ROWS, np.bool_)
    flat = memory.reshape(-1)[: memory.size - gap]
    lookup.unpool(flat, dim, NUM_SLOTS * dim + gap, index, offsets, NUM_SLOTS, mean, sums.reshape(-1), touched)
    expected, is_touched = plain_unpool(grads, index, offsets, mean)
    assert np.array_equal(touched, is_touched)
    assert np.array_equal(sums[touched].view(np.uint32), expected[touched].view(np.uint32))


def plain_pool(rows: np.ndarray, index: np.ndarray, offsets: np.ndarray, mean: bool) -> np.ndarray:
    out = np.zeros((NUM_SAMPLES, NUM_SLOTS, rows.shape[1]), np.float32)
    for b in range(len(offsets) - 1):
        bag = index[offsets[b] : offsets[b + 1]]
        ids, place = bag[bag >= 0], (b % NUM_SAMPLES, b // NUM_SAMPLES)
        for u in ids:
            out[place] += rows[u]
        if len(bag) == len(ids) == 1:
            out[place] = rows[ids[0]]  # also the sign of a zero
        if mean and len(ids) > 1:
            out[place] /= np.float32(len(ids))
    return out


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("most", [1, 4, 30], ids=["one id", "few", "many"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_pool_sums_as_numpy_does_in_the_same_order(dim: int, padded: bool, most: int, mean: bool) -> None:
    rng = np.random.default_rng(dim)
    index, offsets = bags(rng, most)
    index = index if padded else np.abs(index)
    rows = rng.standard_normal((NUM_ROWS, dim)).astype(np.float32)
    rows[: NUM_ROWS // 2, 0] = -0.0
    out = np.full((NUM_SAMPLES, NUM_SLOTS, dim), np.nan, np.float32)
    for first, last in ((0, 7), (7, 7), (7, NUM_SAMPLES)):  # as several threads do
        lookup.pool(rows.reshape(-1), dim, index, offsets, NUM_SLOTS, mean, out.reshape(-1), first, last)
    assert np.array_equal(out.view(np.uint32), plain_pool(rows, index, offsets, mean).view(np.uint32))


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("dim", DIMS)
def test_add_rows_sums_as_numpy_does_in_the_same_order(dim: int, gap: int) -> None:
    rng = np.random.default_rng(dim)
    index, _ = bags(rng, 1)
    memory = rng.standard_normal((len(index), dim + gap)).astype(np.float32)
    grads = memory[:, :dim]
    sums, touched = np.full((NUM_ROWS, dim), NOTHING), np.zeros(NUM_ROWS, np.bool_)
    lookup.add_rows(memory.reshape(-1)[: memory.size - gap], dim, dim + gap, index, sums.reshape(-1), touched)
    for u in range(NUM_ROWS):
        own = grads[index == u]
        assert touched[u] == bool(len(own))
        expected = np.add.accumulate(own, axis=0)[-1:] if len(own) else sums[u : u + 1]
        assert np.array_equal(sums[u : u + 1].view(np.uint32), expected.view(np.uint32))
