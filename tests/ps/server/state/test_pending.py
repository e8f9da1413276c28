"""Rows that wait for a subscriber: a set, from which each row is taken once, and none waits for others to rest."""

from __future__ import annotations

import numpy as np
import pytest

from torchfleet.ps.kernels import marks
from torchfleet.ps.server.state.pending import PendingRows


@pytest.mark.parametrize("num_rows", [100, marks.PAGE_ROWS + 1, 5 * marks.PAGE_ROWS])
def test_rows_are_a_set(num_rows: int) -> None:
    rng, pending, expected = np.random.default_rng(num_rows), PendingRows(), set[int]()
    for _ in range(60):
        noted = rng.integers(0, num_rows, rng.integers(0, 50))
        pending.note(noted)
        expected |= set(noted.tolist())
        taken = pending.take(int(rng.integers(0, 60))).tolist()
        assert taken == sorted(set(taken))
        assert set(taken) <= expected
        expected -= set(taken)
        assert pending.num == len(expected)
        pending.settle(True)
    assert pending.take(num_rows).tolist() == sorted(expected)
    assert pending.num == 0
    assert len(pending.take(10)) == 0


def test_rows_of_a_lost_reply_come_again() -> None:
    pending = PendingRows()
    pending.note(np.array([7, 3, 70_000]))
    assert pending.take(2).tolist() == [3, 7]
    pending.settle(False)
    pending.note(np.array([7]))
    assert pending.num == 3
    assert sorted([*pending.take(2).tolist(), *pending.take(2).tolist()]) == [3, 7, 70_000]


def test_rows_that_change_all_the_time_keep_no_other_waiting() -> None:
    pending = PendingRows()
    pending.note(np.arange(100))
    taken: list[int] = []
    for _ in range(10):
        taken += pending.take(20).tolist()
        pending.note(np.arange(20))  # the first ones, again and again
    assert set(taken) == set(range(100))


def test_rows_that_are_missing_are_left_out() -> None:
    pending = PendingRows()
    pending.note(np.array([-1, 5, -1]))
    assert (pending.num, pending.take(9).tolist()) == (1, [5])
