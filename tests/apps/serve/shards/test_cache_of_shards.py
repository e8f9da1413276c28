"""Rows that were read last: right ones only, in bounded memory, the hot ones among them."""

from __future__ import annotations

import numpy as np
import pytest

from torchfleet.apps.serve.shards.row_cache import RowCache


def row_of(keys: np.ndarray, dim: int = 4) -> np.ndarray:
    """A row that tells its key."""
    return np.repeat(keys.astype(np.float32)[:, None], dim, axis=1)


def test_what_is_here_is_right_and_the_rest_reads_as_zeros() -> None:
    rng = np.random.default_rng(0)
    cache = RowCache(4, 1 << 14)
    seen: set[int] = set()
    for _ in range(200):
        keys = np.unique(rng.integers(-500, 500, 40))
        rows, is_here = cache.take(keys)
        np.testing.assert_array_equal(rows[is_here], row_of(keys[is_here]))
        assert not rows[~is_here].any()
        assert set(keys[is_here].tolist()) <= seen
        cache.put(keys[~is_here], row_of(keys[~is_here]))
        seen |= set(keys.tolist())
    assert cache.num_hits + cache.num_misses > 0


def test_a_key_of_zero_is_not_here_before_it_was_put() -> None:
    cache = RowCache(2, 1 << 12)
    assert not cache.take(np.zeros(1, np.int64))[1].any()


@pytest.mark.parametrize("max_bytes", [1 << 12, 1 << 16, 10_000_000])
def test_memory_is_bounded_whatever_is_put(max_bytes: int) -> None:
    cache = RowCache(8, max_bytes)
    assert max_bytes / 2 < cache.num_bytes + 1 <= max_bytes + 1
    keys = np.arange(max_bytes // 16)
    cache.put(keys, row_of(keys, 8))
    assert cache.num_bytes <= max_bytes


def test_hot_rows_stay_while_cold_ones_pass() -> None:
    cache = RowCache(4, 1 << 15)
    hot = np.arange(100)
    cache.put(hot, row_of(hot))
    num_kept = []
    for start in range(1000, 100_000, 500):
        num_kept.append(int(cache.take(hot)[1].sum()))
        cold = np.arange(start, start + 50)
        cache.put(cold, row_of(cold))
    assert min(num_kept) >= 80  # those whose places many hot rows share may be lost
