"""Tracking of changes: two generations of them, held against Python's sets."""

from __future__ import annotations

import gc
import sys
from unittest import mock

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.marks import PAGE_ROWS
from torchfleet.ps.tables.rows import tracking
from torchfleet.ps.tables.rows.tracking import Tracking

MAX_ROWS = 3 * PAGE_ROWS + 77
KEYS = st.lists(st.integers(0, 30) | st.integers(0, 2**64 - 1), max_size=20)


def edges(*numbers: int) -> st.SearchStrategy[int]:
    return st.sampled_from([number + step for number in numbers for step in (-1, 0, 1) if number + step >= 0])


ROWS = st.one_of(
    st.integers(0, 200),
    st.integers(-5, MAX_ROWS - 1),
    edges(0, 63, 127, PAGE_ROWS, 2 * PAGE_ROWS).filter(lambda row: row < MAX_ROWS),
    st.just(MAX_ROWS - 1),
)
RANGES = st.tuples(*[st.integers(-10, 300) | st.integers(0, MAX_ROWS + 10) | edges(0, 64, PAGE_ROWS, MAX_ROWS)] * 2)
STEPS = st.one_of(
    st.tuples(st.just("mark"), st.lists(ROWS, max_size=30)),
    st.tuples(st.just("gone"), KEYS),
    st.tuples(st.just("begin"), st.booleans()),
    st.tuples(st.just("changed"), RANGES),
)


class Twin:
    """A Tracking, and the four sets that it should be."""

    def __init__(self) -> None:
        self.tracking = Tracking(MAX_ROWS)
        self.rows: tuple[set[int], set[int]] = set(), set()  # current, under way
        self.keys: tuple[set[int], set[int]] = set(), set()

    def mark(self, rows: list[int]) -> None:
        self.tracking.mark(np.array(rows, np.int64))
        self.rows[0].update(row for row in rows if row >= 0)

    def gone(self, keys: list[int]) -> None:
        given = np.array(keys, np.uint64)
        self.tracking.note_gone(given)
        given[:] = 12345  # the caller's memory is the caller's
        self.keys[0].update(keys)

    def begin(self, is_committed: bool) -> None:
        self.tracking.begin(is_committed)
        self.rows = set(), self.rows[0] | (set() if is_committed else self.rows[1])
        self.keys = set(), self.keys[0] | (set() if is_committed else self.keys[1])

    def changed(self, limits: tuple[int, int]) -> None:
        start, stop = limits
        found = self.tracking.changed(start, stop)
        assert found.dtype == np.int64
        assert found.tolist() == sorted(row for row in self.rows[1] if start <= row < stop)

    def check(self) -> None:
        self.changed((0, MAX_ROWS))
        gone = self.tracking.gone
        assert gone.dtype == np.uint64
        assert len(gone) == len(self.keys[1])
        assert set(gone.tolist()) == self.keys[1]


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(st.lists(STEPS, max_size=25), st.sampled_from([4, 1 << 16]))
def test_any_sequence_of_changes_and_saves_agrees_with_sets(steps, compact_at):
    with mock.patch.object(tracking, "_COMPACT_AT", compact_at):
        twin = Twin()
        for name, argument in steps:
            getattr(twin, name)(argument)
            twin.check()


def test_what_changes_during_a_save_belongs_to_the_next_one():
    made = Tracking(1000)
    made.mark(np.array([5, 900, 5, -1]))
    made.note_gone(np.array([7], np.uint64))
    assert not len(made.changed(0, 1000))
    made.begin(True)
    made.mark(np.array([6]))
    made.note_gone(np.array([8], np.uint64))
    assert made.changed(0, 1000).tolist() == [5, 900]
    assert made.gone.tolist() == [7]
    made.begin(True)
    assert made.changed(0, 1000).tolist() == [6]
    assert made.gone.tolist() == [8]


def test_a_save_that_failed_is_written_again_with_what_came_since():
    made = Tracking(1000)
    for step in range(3):
        made.mark(np.array([step]))
        made.note_gone(np.array([step + 10], np.uint64))
        made.begin(False)
    assert made.changed(0, 1000).tolist() == [0, 1, 2]
    assert made.gone.tolist() == [10, 11, 12]
    made.begin(True)
    assert not len(made.changed(0, 1000))
    assert not len(made.gone)


def test_asking_twice_gives_the_same():
    made = Tracking(1000)
    made.mark(np.arange(100))
    made.note_gone(np.array([1, 2, 1], np.uint64))
    made.begin(True)
    assert made.changed(10, 90).tolist() == made.changed(10, 90).tolist() == list(range(10, 90))
    assert made.gone.tolist() == made.gone.tolist() == [1, 2]


def test_the_list_of_gone_keys_stays_compact():
    made = Tracking(1000)
    keys = np.arange(1000, dtype=np.uint64)
    for _ in range(500):
        made.note_gone(keys)
    assert made.num_bytes < 8 * (1 << 16) + 10_000
    made.begin(True)
    assert made.gone.tolist() == keys.tolist()


@pytest.mark.parametrize("row", [1000, 1001, 1 << 15, 1 << 40, 2**63 - 1])
def test_a_row_number_that_cannot_be_is_an_error_and_touches_nothing(row):
    made = Tracking(1000)
    with pytest.raises(IndexError, match=naming(1, 2, "1,000")):
        made.mark(np.array([999, row]))
    made.begin(True)
    assert made.changed(0, 1 << 41).tolist() == [999]


@pytest.mark.parametrize("max_rows", [1, 63, 64, 65, PAGE_ROWS, PAGE_ROWS + 1])
def test_every_row_up_to_the_last_can_be_marked(max_rows):
    made = Tracking(max_rows)
    made.mark(np.arange(max_rows))
    made.begin(False)
    assert np.array_equal(made.changed(0, max_rows), np.arange(max_rows))
    assert made.changed(max_rows - 1, max_rows).tolist() == [max_rows - 1]
    assert not len(made.changed(max_rows, max_rows + 100))


def test_a_failed_reservation_leaves_all_as_it_was():
    made = Tracking(1000)
    made.mark(np.array([3]))
    made.begin(True)
    made.mark(np.array([4]))
    with mock.patch.object(tracking, "Memory", side_effect=TableError("no room")), pytest.raises(TableError):
        made.begin(True)
    assert made.changed(0, 1000).tolist() == [3]
    made.begin(True)
    assert made.changed(0, 1000).tolist() == [4]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read as on Linux")
def test_for_billions_of_rows_only_what_is_touched_takes_memory():
    """Half a gigabyte of bits per generation, of which a few huge pages are touched."""
    num = 1 << 32
    Tracking(100).begin(False)  # load the kernels
    gc.collect()
    before = psutil.Process().memory_info().rss
    made = Tracking(num)
    places = np.array([0, 1, 1 << 20, 1 << 31, num - 1])
    made.mark(places)
    made.begin(True)
    made.mark(places + np.array([1, 1, 1, 1, -1]))
    assert made.changed(0, num).tolist() == places.tolist()
    made.begin(False)
    assert made.changed(0, num).tolist() == sorted({*places.tolist(), 2, (1 << 20) + 1, (1 << 31) + 1, num - 2})
    assert made.num_bytes < 1 << 20
    assert psutil.Process().memory_info().rss - before < 32 << 20


def test_bytes_grow_with_the_rows_that_are_marked():
    made = Tracking(1 << 30)
    empty = made.num_bytes
    made.mark(np.arange(1_000_000))
    assert 125_000 <= made.num_bytes - empty <= 130_000
    made.begin(True)
    assert 125_000 <= made.num_bytes - empty <= 130_000
    made.begin(True)
    assert made.num_bytes == empty
