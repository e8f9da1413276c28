"""Uses the kernels of workers once, on arrays of the types that clients and lookups pass."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels import lookup, merge, partition, pooling, rows, table_groups

_DIM, _NUM = 2, 3


def warm_up_workers() -> None:
    """Compile the kernels, or load them from the cache."""
    keys, values = np.array([1, 2, 1], np.uint64), np.ones((_NUM, _DIM), np.float32)
    _split(keys, values)
    _merge(keys, values)
    _look_up(keys, values)
    _pool(np.zeros(_NUM, np.int32), values)


def _split(keys: np.ndarray, values: np.ndarray) -> None:
    """Split keys by server, and gather and scatter their rows."""
    owners, places = np.zeros(_NUM, np.int32), np.zeros(_NUM, np.int64)
    partition.owners_by_hash(keys, 2, owners)
    partition.group_by_owner(keys, owners, np.zeros(3, np.int64), keys.copy(), places)
    rows.gather(values.reshape(-1), _DIM, 0, places, values.copy())
    rows.scatter(values.reshape(-1), _DIM, 0, places, values.copy())
    rows.all_finite(values.reshape(-1).view(np.uint32))
    counts, starts = np.ones(1, np.int64), np.arange(2)
    table_groups.are_keys_at(keys.ctypes.data, keys, 0, _NUM)
    table_groups.put_pairs(keys, values.reshape(-1), counts, counts, np.zeros(2, np.uint64), starts[:1], starts[1:])


def _merge(keys: np.ndarray, values: np.ndarray) -> None:
    merge.sum_by_key(keys, values)
    merge.renumber(np.zeros(_NUM, np.int32), np.zeros(_NUM, np.int32))


def _look_up(keys: np.ndarray, values: np.ndarray) -> None:
    distinct, index, places = merge.unique_places(keys)
    sums, touched = values.reshape(-1).copy(), np.zeros(_NUM, np.bool_)
    lookup.index_of(keys, places, distinct, index, merge.SALT)
    rows.gather(values.reshape(-1), _DIM, 0, index, values.copy())
    lookup.add_rows(values.reshape(-1), _DIM, _DIM, index, sums, touched)


def _pool(index: np.ndarray, values: np.ndarray) -> None:
    """The ids of three samples with one slot."""
    flat, offsets, weights = values.reshape(-1), np.arange(_NUM + 1), np.ones(_NUM, np.float32)
    sums, touched, winners = flat.copy(), np.zeros(_NUM, np.bool_), np.zeros(values.size, np.int32)
    lookup.pool(flat, _DIM, index, offsets, 1, True, sums, 0, _NUM)
    lookup.unpool(flat, _DIM, _DIM, index, offsets, 1, True, sums, touched)
    lookup.add_shows(index, offsets, _NUM, True, weights, weights, np.zeros((_NUM, 3), np.float32))
    pooling.pool_weighted(flat, _DIM, index, weights, offsets, 1, sums)
    pooling.unpool_weighted(flat, _DIM, index, weights, offsets, 1, sums, touched)
    pooling.weight_gradients(flat, flat, _DIM, index, offsets, 1, weights)
    pooling.pool_max(flat, _DIM, index, offsets, 1, sums, winners)
    pooling.unpool_max(flat, _DIM, winners, sums, touched)
