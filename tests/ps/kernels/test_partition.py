"""Partition and hashing of keys: who owns a key, and the counting sort by owner."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support import twins

from torchfleet.ps.kernels.partition import group_by_owner, owners_by_hash


def owners(keys: np.ndarray, num_owners: int) -> np.ndarray:
    found = np.full(len(keys), -1, np.int32)
    owners_by_hash(keys, num_owners, found)
    return found


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 50), max_size=50), st.integers(1, 1 << 16))
def test_the_owner_of_a_key_is_that_of_the_formula(keys, num_owners):
    found = owners(np.array(keys, np.uint64), num_owners)
    assert found.tolist() == [twins.owner_of(key, num_owners) for key in keys]
    assert ((found >= 0) & (found < num_owners)).all()


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 6)), max_size=100))
def test_grouping_is_a_stable_sort_by_owner(pairs):
    keys = np.array([key for key, _ in pairs], np.uint64)
    owners = np.array([owner for _, owner in pairs], np.int32)
    starts, grouped, places = np.zeros(8, np.int64), np.empty_like(keys), np.empty(len(keys), np.int64)
    group_by_owner(keys, owners, starts, grouped, places)
    expected_starts, expected_grouped, expected_places = twins.group_by_owner(keys, owners, 7)
    assert starts.tolist() == expected_starts.tolist()
    assert grouped.tolist() == expected_grouped.tolist()
    assert places.tolist() == expected_places.tolist()


def test_the_keys_of_one_owner_fill_the_whole_of_its_map():
    """Owner and home bucket come from different hashes: under any secret of a map, one server's keys are spread over
    all of the map's buckets."""
    keys = np.arange(40_000, dtype=np.uint64)
    mine = keys[owners(keys, 4) == 2]
    for seed in range(3):
        homes = (twins.scramble(mine, twins.secret(seed)) >> np.uint64(32)) * np.uint64(16) >> np.uint64(32)
        counts = np.bincount(homes.astype(np.int64), minlength=16)
        assert counts.min() > 0.8 * len(mine) / 16
