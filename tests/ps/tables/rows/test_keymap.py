"""A KeyMap is a dict from keys to row numbers, through every growth."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import naming
from support.searches import examples
from support.twins import key_with_tag, keys_and_rows, secret_of, set_secret

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import hashmap
from torchfleet.ps.kernels.hashing import NUM_SECRETS
from torchfleet.ps.kernels.hashmap import BUCKET, MISSING, MOVED, NEW, OLD
from torchfleet.ps.tables.rows import keymap
from torchfleet.ps.tables.rows.keymap import KeyMap

LARGEST = 2**64 - 1


class Twin:
    """A KeyMap and the dict that it should be; every operation runs on both and compares."""

    def __init__(self, seed: int = 77) -> None:
        self.index = KeyMap(1, 1 << 22)
        set_secret(self.index, seed)
        self.rows: dict[int, int] = {}
        self.free: list[int] = []
        self.num_row_numbers = 0

    def find(self, keys: list[int]) -> None:
        found = np.full(len(keys), 12345, np.int64)
        num_missing = self.index.find(np.array(keys, np.uint64), found, 1)
        assert found.tolist() == [self.rows.get(key, MISSING) for key in keys]
        assert num_missing == sum(key not in self.rows for key in keys)

    def insert(self, keys: list[int]) -> None:
        batch, found = np.array(keys, np.uint64), np.empty(len(keys), np.int64)
        self.index.find(batch, found, 1)
        fresh = self.index.insert_missing(batch, found)
        expected_fresh = []
        for place, key in enumerate(keys):
            if key not in self.rows:
                expected_fresh.append(place)
                self.rows[key] = self.free.pop() if self.free else self.num_row_numbers
                self.num_row_numbers = max(self.num_row_numbers, self.rows[key] + 1)
        assert fresh.tolist() == expected_fresh
        assert found.tolist() == [self.rows[key] for key in keys]

    def erase(self, keys: list[int]) -> None:
        gone = [key for key in dict.fromkeys(keys) if key in self.rows]
        assert self.index.erase(np.array(keys, np.uint64)) == len(gone)
        self.free += [self.rows.pop(key) for key in gone]

    def check(self) -> None:
        assert keys_and_rows(self.index) == self.rows
        assert self.index.num_keys == len(self.rows)
        assert self.index.num_row_numbers == self.num_row_numbers
        keys, rows = self.index.alive(np.arange(self.num_row_numbers))
        by_row = sorted((row, key) for key, row in self.rows.items())
        assert list(zip(rows.tolist(), keys.tolist(), strict=True)) == by_row


def state_of(index: KeyMap) -> tuple[int, int]:
    """(buckets carried over, buckets of the old slots)."""
    return int(index._state[MOVED]), index._slots[OLD].size // BUCKET


keys = st.one_of(
    st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, LARGEST - 1, LARGEST]),
    st.integers(0, 500),
    st.integers(0, LARGEST),
    st.tuples(st.sampled_from([0, 0xFFFFFFFF, 0x80000000]), st.integers(0, 20)),  # (tag, low half): made to collide
)
operations = st.lists(
    st.tuples(st.sampled_from(["find", "insert", "insert", "erase"]), st.lists(keys, max_size=60)), max_size=30
)


def run(twin: Twin, operations) -> None:
    for name, drawn in operations:
        secret = secret_of(twin.index)
        getattr(twin, name)([key_with_tag(*key, secret) if isinstance(key, tuple) else key for key in drawn])
        twin.check()


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(st.integers(0, LARGEST), operations)
def test_a_key_map_is_a_dict(seed, operations):
    with mock.patch.object(keymap, "FIRST_BUCKETS", 4):
        run(Twin(seed), operations)


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(st.integers(0, LARGEST), st.integers(1, 48), operations)
def test_a_key_map_is_a_dict_while_it_grows(seed, num_moved, operations):
    with mock.patch.object(keymap, "SMALL", 1), mock.patch.object(keymap, "MOVES_PER_KEY", 0):
        twin = Twin(seed)
        twin.insert(list(range(360)))
        twin.insert(list(range(360, 380)))  # the 369th key asks for a larger map
        twin.index._migrate(num_moved)
        moved, end = state_of(twin.index)
        assert num_moved <= moved < end or not twin.index._migrating  # a long run of full buckets may reach the end
        twin.check()
        run(twin, operations)


def test_keys_are_found_inserted_and_erased_on_both_sides_of_every_growth():
    """Thousands of calls, nearly all of them between the begin and the end of a growth."""
    rng = np.random.default_rng(1)
    during, num_growths = {"find": 0, "insert": 0, "erase": 0}, 0
    with mock.patch.object(keymap, "SMALL", 1), mock.patch.object(keymap, "MOVES_PER_KEY", 1):
        twin = Twin()
        consecutive = iter(range(10**6))
        while twin.index.num_keys < 6000:
            known = rng.choice(np.fromiter(twin.rows, np.uint64, len(twin.rows)), 8).tolist() if twin.rows else []
            fresh = [next(consecutive) for _ in range(8)] + rng.integers(0, 2**64, 8, dtype=np.uint64).tolist()
            for name, batch in (("insert", fresh + known + fresh[:3]), ("find", fresh + known), ("erase", known[:4])):
                moved, end = state_of(twin.index)
                during[name] += twin.index._migrating and 0 < moved < end
                num_buckets = int(twin.index._num_buckets[NEW])
                getattr(twin, name)(batch)
                num_growths += int(twin.index._num_buckets[NEW]) > num_buckets
            if rng.random() < 0.05:
                twin.check()
        twin.check()
        twin.find(list(twin.rows))
    assert num_growths > 10
    assert min(during.values()) > 100


def test_rows_freed_by_erase_are_used_again_before_new_ones():
    twin = Twin()
    twin.insert(list(range(1000)))
    for start in range(1000, 20_000, 1000):
        twin.erase(list(range(start - 1000, start - 500)))
        twin.insert(list(range(start, start + 500)))
        twin.erase(list(range(start - 500, start)))
        twin.insert(list(range(start + 500, start + 1000)))
        assert twin.index.num_row_numbers == 1000
    twin.check()


def test_erasing_and_inserting_again_for_ever_does_not_grow_the_map():
    twin = Twin()
    twin.insert(list(range(300)))
    before = twin.index.num_bytes
    for start in range(300, 30_000, 300):
        twin.erase(list(range(start - 300, start)))
        assert twin.index.num_keys == 0
        twin.insert(list(range(start, start + 300)))
    assert twin.index.num_bytes == before
    twin.check()


def test_no_insert_waits_for_a_whole_rehash(monkeypatch):
    """Above SMALL buckets a call of n keys carries over MOVES_PER_KEY · n buckets and the run of full ones behind."""
    moved = 0
    migrate = hashmap.migrate

    def counting(old, new, num_buckets, state, num_to_move):
        nonlocal moved
        before = int(state[MOVED])
        result = migrate(old, new, num_buckets, state, num_to_move)
        moved += int(result) - before
        return result

    monkeypatch.setattr(keymap.hashmap, "migrate", counting)
    index = KeyMap(1, 1 << 28)
    next_key, num_growths, largest_share = 0, 0, 0.0
    for num_keys, batch in ((400_000, 2048), (520_000, 16), (600_000, 300)):
        while next_key < num_keys:
            keys = np.arange(next_key, next_key + batch, dtype=np.uint64)
            next_key += batch
            rows = np.full(batch, MISSING, np.int64)
            moved, num_buckets = 0, int(index._num_buckets[NEW])
            index.insert_missing(keys, rows)
            bound = keymap.SMALL if num_buckets < keymap.SMALL else keymap.MOVES_PER_KEY * batch
            assert moved <= bound + 256
            if num_buckets >= keymap.SMALL:
                num_growths += int(index._num_buckets[NEW]) > num_buckets
                largest_share = max(largest_share, moved / num_buckets)
    assert num_growths >= 5
    assert largest_share < 0.3
    assert index.num_keys == next_key


def test_growth_is_over_before_the_next_one_begins(monkeypatch):
    """Else `_make_room` would have to carry over the rest in one go."""
    leftovers = []
    finish = KeyMap._finish_migration
    monkeypatch.setattr(KeyMap, "_finish_migration", lambda index: leftovers.append(index._migrating) or finish(index))
    index = KeyMap(1, 1 << 28)
    for start in range(0, 300_000, 100):
        keys = np.arange(start, start + 100, dtype=np.uint64)
        before = len(leftovers), int(index._num_buckets[NEW])
        index.insert_missing(keys, np.full(100, MISSING, np.int64))
        if before[1] >= keymap.SMALL:
            assert not any(leftovers[before[0] :])
    assert len(leftovers) > 10


def test_alive_gives_those_of_some_rows_that_are_in_use():
    twin = Twin()
    twin.insert(list(range(100, 200)))
    twin.erase([100, 150, 199])
    twin.insert([7])  # takes the row that 199 had
    keys, rows = twin.index.alive(np.arange(40, 60))
    assert rows.tolist() == [row for row in range(40, 60) if row != 50]
    assert keys.tolist() == [100 + row for row in rows.tolist()]
    keys, rows = twin.index.alive(np.arange(99, 100))
    assert (keys.tolist(), rows.tolist()) == ([7], [99])
    keys, rows = twin.index.alive(np.arange(0))
    assert len(keys) == len(rows) == 0


def test_a_key_that_came_back_to_another_row_is_live_once():
    twin = Twin()
    twin.insert([1, 2, 3])
    twin.erase([1, 2])
    twin.insert([2, 5])  # freed rows are taken from the last: 2 comes back to its own row, 5 gets the row of 1
    twin.erase([5, 2])
    twin.insert([5])  # and now 5 is in the row where 2 was, while its old row still shows its key
    keys, rows = twin.index.alive(np.arange(0, 3))
    assert (keys.tolist(), rows.tolist()) == ([5, 3], [1, 2])
    twin.check()


def test_two_maps_have_different_secrets():
    assert len({word for _ in range(8) for word in secret_of(KeyMap(1, 1 << 12))}) == 8 * NUM_SECRETS


def test_a_limit_below_one_row_is_an_error_that_names_both():
    with pytest.raises(TableError, match=naming(40, "max_table_bytes", 39)):
        KeyMap(8, 39)


def test_load_factor_and_free_rows_count_keys():
    index = KeyMap(2, 16 * 50)
    assert (index.num_free_rows, index.load_factor) == (50, 0.0)
    index.insert_missing(np.arange(20, dtype=np.uint64), np.full(20, MISSING, np.int64))
    assert index.num_free_rows == 30
    assert index.load_factor == 20 / (64 * BUCKET)
    index.erase(np.arange(5, dtype=np.uint64))
    assert index.num_free_rows == 35


@pytest.mark.parametrize("num", [2_000, 200_000, 1_000_000])
def test_a_map_does_not_begin_to_grow_for_keys_that_it_has(num):
    """Else it would be half in its old place for as long as no new key comes."""
    index = KeyMap(1, 1 << 28)
    keys = np.arange(200_000, dtype=np.uint64)
    index.reserve_at_once(len(keys))
    assert index.load(keys, np.zeros((len(keys), 1), np.float32))
    before = index._num_buckets.tolist()
    index.reserve_for(np.resize(keys, num))
    assert index._num_buckets.tolist() == before
    index.reserve_for(np.arange(1 << 40, (1 << 40) + num, dtype=np.uint64))
    assert int(index._num_buckets[NEW]) > before[NEW]
