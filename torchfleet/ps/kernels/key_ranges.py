"""Ids 0..size-1 whose row is the id itself, divided among servers: checked and found in one pass."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.jit import kernel


@kernel
def all_below(keys_N: np.ndarray, size: np.uint64) -> bool:
    is_below = True
    for i in range(len(keys_N)):
        is_below &= keys_N[i] < size
    return is_below


@kernel
def all_of_shard(keys_N: np.ndarray, shard: np.uint64, num_shards: np.uint64) -> bool:
    """Whether every key leaves the remainder `shard`."""
    is_own = True
    for i in range(len(keys_N)):
        is_own &= keys_N[i] % num_shards == shard
    return is_own


@kernel
def rows_in_use(keys_N: np.ndarray, num_shards: np.uint64, in_use_R: np.ndarray, rows_N: np.ndarray) -> int:
    """rows_N[i] = the row of keys_N[i], or -1 where it is not in use. Returns how many are not."""
    missing = 0
    for i in range(len(keys_N)):
        row = np.int64(keys_N[i] // num_shards)
        if in_use_R[row]:
            rows_N[i] = row
        else:
            rows_N[i] = -1
            missing += 1
    return missing
