"""Keys and their owners: a counting sort by server, and ids 0..size-1 that are assigned to servers round-robin."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import owner_of
from torchfleet.ps.kernels.jit import kernel


@kernel
def owners_by_hash(keys_N: np.ndarray, num_owners: int, owners_N: np.ndarray) -> None:
    for i in range(len(keys_N)):
        owners_N[i] = owner_of(keys_N[i], np.uint64(num_owners))


@kernel
def group_by_owner(
    keys_N: np.ndarray, owners_N: np.ndarray, starts_S: np.ndarray, grouped_N: np.ndarray, places_N: np.ndarray
) -> None:
    """grouped_N = keys by owner, in their order; grouped_N[j] = keys_N[places_N[j]]; owner s has starts_S[s : s + 2].

    starts_S is zeroed and has one element more than there are owners.
    """
    for i in range(len(owners_N)):
        starts_S[owners_N[i] + 1] += 1
    for s in range(1, len(starts_S)):
        starts_S[s] += starts_S[s - 1]
    for i in range(len(owners_N)):
        at = starts_S[owners_N[i]]
        starts_S[owners_N[i]] = at + 1
        grouped_N[at] = keys_N[i]
        places_N[at] = i
    for s in range(len(starts_S) - 1, 0, -1):
        starts_S[s] = starts_S[s - 1]
    starts_S[0] = 0


@kernel
def all_below(keys_N: np.ndarray, size: np.uint64) -> bool:
    is_below = True
    for i in range(len(keys_N)):
        is_below &= keys_N[i] < size
    return is_below


@kernel
def all_of_shard(keys_N: np.ndarray, shard: np.uint64, num_shards: np.uint64) -> bool:
    """Whether key % num_shards is `shard` for every key."""
    is_own = True
    for i in range(len(keys_N)):
        is_own &= keys_N[i] % num_shards == shard
    return is_own


@kernel
def rows_in_use(keys_N: np.ndarray, num_shards: np.uint64, in_use_R: np.ndarray, rows_N: np.ndarray) -> int:
    """rows_N[i] = the row of keys_N[i], or -1 if it is not in use. Returns how many are not."""
    missing, num_rows = 0, np.uint64(len(in_use_R))
    for i in range(len(keys_N)):
        row = keys_N[i] // num_shards
        if row < num_rows and in_use_R[row]:
            rows_N[i] = np.int64(row)
        else:
            rows_N[i] = -1
            missing += 1
    return missing
