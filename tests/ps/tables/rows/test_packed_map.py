"""tables/rows/packed_map: one battery for both maps, which are dicts from keys to rows through every growth; and what
only a packed map does: its rows move, and values, marks and the order of a walk stay with them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import first_of
from support.messages import naming
from support.searches import examples
from support.twins import key_with_tag, keys_and_rows, packed_keys_and_rows, secret_of, set_secret

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import packed_moves
from torchfleet.ps.kernels.hashing import NUM_SECRETS
from torchfleet.ps.kernels.packed_buckets import BUCKET, MISSING, NEW, OLD, UNMOVED
from torchfleet.ps.tables.rows import keymap, memory, packed_map
from torchfleet.ps.tables.rows.keymap import KeyMap
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.rows.packed_map import Pace, PackedMap

LARGEST = 2**64 - 1
MAPS = (KeyMap, PackedMap)


def moves(per_key: int):
    """How many buckets a packed map moves per new key."""
    return mock.patch.object(Pace, "num_moves", lambda pace, num_keys: per_key * num_keys)


class Twin:
    """A map and the dict that it should be. Each key has a number of its own in its row, which must stay with it."""

    def __init__(self, kind: type, seed: int = 77) -> None:
        self.index = kind(1, 1 << 22)
        set_secret(self.index, seed)
        self.numbers: dict[int, int] = {}
        self.next_number = 1

    def values(self, rows: np.ndarray) -> np.ndarray:
        return self.index.store[rows * self.index.width + 2]

    def find(self, keys: list[int]) -> None:
        found = np.full(len(keys), 12345, np.int64)
        num_missing = self.index.find(np.array(keys, np.uint64), found, 1)
        assert num_missing == sum(key not in self.numbers for key in keys)
        is_there = found != MISSING
        assert is_there.tolist() == [key in self.numbers for key in keys]
        assert self.values(found[is_there]).tolist() == [self.numbers[key] for key in keys if key in self.numbers]

    def insert(self, keys: list[int]) -> None:
        batch, found = np.array(keys, np.uint64), np.empty(len(keys), np.int64)
        self.index.find(batch, found, 1)
        fresh = self.index.insert_missing(batch, found)
        expected = [place for place, key in enumerate(keys) if key not in self.numbers and key not in keys[:place]]
        assert fresh.tolist() == expected
        for place in expected:
            self.numbers[keys[place]] = self.next_number
            self.index.store[found[place] * self.index.width + 2] = self.next_number
            self.next_number += 1
        assert self.values(found).tolist() == [self.numbers[key] for key in keys]

    def load(self, keys: list[int]) -> None:
        batch = np.array(keys, np.uint64)
        numbers = np.arange(self.next_number, self.next_number + len(keys), dtype=np.float32)
        if self.index.load(batch, numbers.reshape(-1, 1)):
            self.next_number += len(keys)
            self.numbers |= dict(zip(keys, numbers.astype(int).tolist(), strict=True))

    def erase(self, keys: list[int]) -> None:
        gone = [key for key in dict.fromkeys(keys) if key in self.numbers]
        assert self.index.erase(np.array(keys, np.uint64)) == len(gone)
        for key in gone:
            del self.numbers[key]

    def check(self) -> None:
        read = packed_keys_and_rows if isinstance(self.index, PackedMap) else keys_and_rows
        rows = read(self.index)
        assert rows.keys() == self.numbers.keys()
        keys, found = self.index.alive(np.array(sorted(rows.values()), np.int64))
        assert dict(zip(keys.tolist(), found.tolist(), strict=True)) == rows
        assert self.values(np.array(list(rows.values()), np.int64)).tolist() == [self.numbers[key] for key in rows]
        assert self.index.num_free_rows == self.index.max_rows - len(rows)


keys = st.one_of(
    st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, LARGEST - 1, LARGEST]),
    st.integers(0, 500),
    st.integers(0, LARGEST),
    st.tuples(st.sampled_from([0, 0xFFFFFFFF, 0x80000000]), st.integers(0, 20)),  # (high, low half of the hash)
)
operations = st.lists(
    st.tuples(st.sampled_from(["find", "insert", "insert", "load", "erase"]), st.lists(keys, max_size=60)), max_size=30
)


def run(twin: Twin, operations) -> None:
    for name, drawn in operations:
        secret = secret_of(twin.index)
        getattr(twin, name)([key_with_tag(*key, secret) if isinstance(key, tuple) else key for key in drawn])
        twin.check()


@pytest.mark.parametrize("kind", MAPS)
@settings(max_examples=examples(20))
@given(st.integers(0, LARGEST), operations)
def test_a_map_is_a_dict(kind, seed, operations):
    with mock.patch.object(keymap, "FIRST_BUCKETS", 4), mock.patch.object(packed_map, "FIRST_BUCKETS", 2):
        run(Twin(kind, seed), operations)


def begin_growth(num_moved: int, seed: int = 77) -> Twin:
    """A packed map of some 510 keys, of whose 32 old home buckets at least `num_moved` have been moved."""
    twin = Twin(PackedMap, seed)
    limit = int(Pace(3).max_load * 32 * BUCKET)
    twin.insert(list(range(limit)))
    with mock.patch.object(packed_map, "SMALL", 1), moves(0):
        twin.insert(list(range(limit, limit + 30)))
        twin.index._migrate(num_moved)
    assert twin.index._num_buckets[NEW] > twin.index._num_buckets[OLD] == 32
    assert twin.index._state[UNMOVED] <= 32 - num_moved
    twin.check()
    return twin


@settings(max_examples=examples(20))
@given(st.integers(0, LARGEST), st.integers(0, 32), operations)
def test_a_packed_map_is_a_dict_while_it_grows(seed, num_moved, operations):
    twin = begin_growth(num_moved, seed)
    with mock.patch.object(packed_map, "SMALL", 1), moves(0):
        run(twin, operations)
    twin.index._finish_migration()
    twin.check()


@pytest.mark.parametrize("kind", MAPS)
def test_keys_are_found_inserted_and_erased_on_both_sides_of_every_growth(kind):
    rng = np.random.default_rng(1)
    during = {"find": 0, "insert": 0, "erase": 0}
    small = mock.patch.object(keymap, "SMALL", 1), mock.patch.object(packed_map, "SMALL", 1)
    slow = mock.patch.object(keymap, "MOVES_PER_KEY", 1), moves(1)
    with small[0], small[1], slow[0], slow[1]:
        twin = Twin(kind)
        consecutive = iter(range(10**6))
        while twin.index.num_keys < 6000:
            known = rng.choice(np.fromiter(twin.numbers, np.uint64, len(twin.numbers)), 8) if twin.numbers else []
            known = [int(key) for key in known]
            fresh = [next(consecutive) for _ in range(8)] + rng.integers(0, 2**64, 8, dtype=np.uint64).tolist()
            for name, batch in (("insert", fresh + known + fresh[:3]), ("find", fresh + known), ("erase", known[:4])):
                during[name] += twin.index._migrating
                getattr(twin, name)(batch)
            if rng.random() < 0.05:
                twin.check()
        twin.check()
        twin.find(list(twin.numbers))
    assert min(during.values()) > 100


@pytest.mark.parametrize("kind", MAPS)
def test_a_growth_is_carried_on_while_nothing_is_asked(kind):
    small = mock.patch.object(keymap, "SMALL", 1), mock.patch.object(packed_map, "SMALL", 1)
    slow = mock.patch.object(keymap, "MOVES_PER_KEY", 0), moves(0)
    slices = mock.patch.object(keymap, "SETTLED_BUCKETS", 4), mock.patch.object(packed_map, "SETTLED_BUCKETS", 4)
    twin = Twin(kind)
    assert not twin.index.settle()
    with small[0], small[1], slow[0], slow[1], slices[0], slices[1]:
        while not twin.index._migrating:
            twin.insert(list(range(twin.next_number, twin.next_number + 50)))
        num_slices = 0
        while twin.index.settle():
            num_slices += 1
            twin.check()
            twin.insert([10**6 + num_slices])
            twin.erase([num_slices])
            twin.find(list(range(0, 10**6, 9973)))
    assert num_slices > 1
    assert not twin.index._migrating
    twin.check()


def test_memory_that_a_growth_has_left_is_given_back_and_no_row_with_it():
    released = []
    release = Memory.release

    def noting(memory, start, stop):
        first = release(memory, start, stop)
        released.append(max(stop - first, 0))
        return first

    with (
        mock.patch.object(memory, "HUGE_PAGE", 4096),
        mock.patch.object(Memory, "release", noting),
        mock.patch.object(packed_map, "SMALL", 1),
    ):
        twin = Twin(PackedMap)
        for start in range(0, 40_000, 100):
            twin.insert(list(range(start, start + 100)))
        twin.check()
        twin.find(list(twin.numbers))
    assert sum(released) > 100 * 4096


def test_rows_that_were_found_before_a_growth_are_right_after_it():
    """`find`, then `insert_missing` with what it found: the map grows in between."""
    with mock.patch.object(packed_map, "SMALL", 1), moves(1000):
        twin = Twin(PackedMap)
        twin.insert(list(range(400)))
        num_growths = 0
        for start in range(400, 4000, 50):
            before = int(twin.index._num_buckets[NEW])
            twin.insert([*range(start - 100, start + 50), 3, start + 49])  # compares what each row holds
            num_growths += int(twin.index._num_buckets[NEW]) > before
    assert num_growths > 10
    twin.check()


def test_no_insert_waits_for_a_whole_move(monkeypatch):
    """A call moves as many buckets as it should for its keys, and the run of full ones below."""
    moved, migrate = [], packed_moves.migrate

    def counting(tags, marks, words, num_buckets, state, *others):
        before = int(state[UNMOVED])
        result = migrate(tags, marks, words, num_buckets, state, *others)
        moved.append(before - int(result))
        return result

    monkeypatch.setattr(packed_map.packed_moves, "migrate", counting)
    index = PackedMap(1, 1 << 26)
    num_growths = 0
    for start in range(0, 1_200_000, 300):
        batch = np.arange(start, start + 300, dtype=np.uint64)
        num_buckets, moved[:] = int(index._num_buckets[NEW]), []
        index.insert_missing(batch, np.full(300, MISSING, np.int64))
        if num_buckets >= packed_map.SMALL:
            num_growths += int(index._num_buckets[NEW]) > num_buckets
            assert sum(moved) <= Pace(3).num_moves(300) + 1000
    assert num_growths >= 20
    assert index.num_keys == 1_200_000


@pytest.mark.parametrize("width", first_of([3, 4, 6, 10, 12]))
def test_a_large_map_never_takes_more_than_a_quarter_over_its_rows(width):
    index = PackedMap(width - 2, 1 << 27)
    index.mark(np.empty(0, np.int64))  # with the memory of marks
    worst, longest_run = 0.0, 0
    for start in range(0, 1_000_000, 500):
        batch = np.arange(start, start + 500, dtype=np.uint64)
        index.insert_missing(batch, np.full(500, MISSING, np.int64))
        if start > 300_000:
            worst = max(worst, index.num_bytes / (4 * width * index.num_keys))
        if start % 50_000 == 0:
            is_full = (index._tags[1::2] >> np.uint64(56))[: int(index._num_buckets[NEW]) + 64] != 0
            ends = np.flatnonzero(~is_full)
            longest_run = max(longest_run, int(np.diff(ends).max()))
    assert worst < 1.23
    assert longest_run < packed_map.LIFTED_BUCKETS // 8


@pytest.mark.parametrize("num_rows", [1, 7, 100, 100_000])
def test_slices_give_every_row_once(num_rows):
    twin = begin_growth(10)
    pieces = list(twin.index.slices(num_rows, False))
    assert max(len(rows) for rows in pieces) <= num_rows
    found = np.concatenate([twin.index.alive(rows)[0] for rows in pieces])
    assert sorted(found.tolist()) == sorted(twin.numbers)


@pytest.mark.parametrize("seed", first_of(range(4)))
def test_a_key_that_lives_through_a_walk_comes_exactly_once(seed):
    rng = np.random.default_rng(seed)
    with mock.patch.object(packed_map, "SMALL", 1):
        twin = Twin(PackedMap)
        twin.insert(list(range(3000)))
        lives, seen = set(range(3000)), []
        for rows in twin.index.slices(150, False):
            seen += twin.index.alive(rows)[0].tolist()
            twin.insert(rng.integers(0, 2**64, 200, dtype=np.uint64).tolist())
            gone = rng.integers(0, 6000, 30).tolist()
            twin.erase(gone)
            lives -= set(gone)
        num_buckets = twin.index._num_buckets.tolist()
    assert num_buckets[NEW] > 1.5 * 3000 / BUCKET
    assert num_buckets[OLD] > 3000 / BUCKET
    assert all(seen.count(key) == 1 for key in lives)


marks = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["insert", "erase", "mark", "mark"]), st.lists(st.integers(0, 600), max_size=60)),
        st.tuples(st.just("begin"), st.booleans()),
    ),
    max_size=25,
)


@settings(max_examples=examples(20))
@given(st.integers(0, 32), marks)
def test_marks_stay_with_their_rows(num_moved, steps):
    twin = begin_growth(num_moved)
    current: set[int] = set()
    under_way: set[int] = set()
    with mock.patch.object(packed_map, "SMALL", 1), moves(1):
        for name, argument in steps:
            if name == "begin":
                twin.index.begin_save(keeps_last=argument)
                current, under_way = set(), current | (under_way if argument else set())
            elif name == "mark":
                rows = np.full(len(argument), MISSING, np.int64)
                twin.index.find(np.array(argument, np.uint64), rows, 0)
                twin.index.mark(rows)
                current |= set(argument) & twin.numbers.keys()
            else:
                getattr(twin, name)(argument)
                current, under_way = current & twin.numbers.keys(), under_way & twin.numbers.keys()
            twin.check()
            found = [key for rows in twin.index.slices(50, True) for key in twin.index.alive(rows)[0].tolist()]
            assert sorted(found) == sorted(under_way)
    twin.index.begin_save(keeps_last=False)
    found = [key for rows in twin.index.slices(50, True) for key in twin.index.alive(rows)[0].tolist()]
    assert sorted(found) == sorted(current)


def test_erasing_and_inserting_again_for_ever_does_not_grow_the_map():
    twin = Twin(PackedMap)
    twin.insert(list(range(300)))
    before = twin.index.num_bytes
    for start in range(300, 30_000, 300):
        twin.erase(list(range(start - 300, start)))
        assert twin.index.num_keys == 0
        twin.insert(list(range(start, start + 300)))
    assert twin.index.num_bytes == before
    twin.check()


def test_a_map_takes_as_many_keys_as_it_has_rows_for():
    index = PackedMap(1, 12 * 5000)
    assert index.num_free_rows == index.max_rows == 5000
    rows = np.full(5000, MISSING, np.int64)
    assert len(index.insert_missing(np.arange(5000, dtype=np.uint64), rows)) == 5000
    assert index.num_free_rows == 0
    assert len(packed_keys_and_rows(index)) == 5000


def test_two_maps_have_different_secrets():
    maps = [PackedMap(1, 1 << 12) for _ in range(8)]
    assert len({word for index in maps for word in secret_of(index)}) == 8 * NUM_SECRETS
    assert len({index._walk_secret for index in maps}) == 8


def test_a_limit_below_one_row_is_an_error_that_names_both():
    with pytest.raises(TableError, match=naming(40, "max_table_bytes", 39)):
        PackedMap(8, 39)


@pytest.mark.parametrize("batch", [100, 2048])
def test_growth_is_over_before_the_next_one_begins(batch, monkeypatch):
    """Else `reserve` would have to move the rest in one go."""
    leftovers = []
    finish = PackedMap._finish_migration
    monkeypatch.setattr(
        PackedMap, "_finish_migration", lambda index: leftovers.append(int(index._state[UNMOVED])) or finish(index)
    )
    index = PackedMap(1, 1 << 26)
    for start in range(0, 800_000, batch):
        before = len(leftovers), int(index._num_buckets[NEW])
        index.insert_missing(np.arange(start, start + batch, dtype=np.uint64), np.full(batch, MISSING, np.int64))
        if before[1] >= 8 * packed_map.SMALL:
            assert not any(leftovers[before[0] :])
    assert len(leftovers) > 10
