"""Threads that share a kernel call: every item once, results in order, errors, calls at the same time, forks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from torchfleet.ps.kernels.team import Team

TIMEOUT = 30.0


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team()
    made.resize(3)
    yield made
    made.resize(1)


@pytest.mark.parametrize("num_items", [0, 1, 19, 20, 21, 29, 30, 1000])
def test_every_item_is_handled_once_and_results_come_in_order(team: Team, num_items: int) -> None:
    counts, where = np.zeros(num_items, np.int64), set()

    def work(start: int, stop: int) -> tuple[int, int]:
        counts[start:stop] += 1
        where.add(threading.get_ident())
        return start, stop

    found = team.share(work, num_items, 10)
    assert (counts == 1).all()
    assert len(found) == min(3, max(1, num_items // 10))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == num_items
    assert len(where) == len(found)


def test_a_team_of_one_works_in_the_calling_thread() -> None:
    assert Team().share(lambda start, stop: threading.get_ident(), 1000, 1) == [threading.get_ident()]


@pytest.mark.parametrize("failing", [0, 500])
def test_an_error_is_raised_after_all_parts_have_ended(team: Team, failing: int) -> None:
    ended = []

    def work(start: int, stop: int) -> None:
        if start <= failing < stop:
            raise ValueError("in a part")
        ended.append(start)

    with pytest.raises(ValueError, match="in a part"):
        team.share(work, 1000, 1)
    assert len(ended) == 2
    assert team.share(lambda start, stop: stop - start, 999, 1) == [333] * 3


def test_a_call_while_another_thread_uses_the_team_is_done_by_its_caller(team: Team) -> None:
    begun, end, found = threading.Event(), threading.Event(), []

    def wait(start: int, stop: int) -> None:
        begun.set()
        assert end.wait(TIMEOUT)

    other = threading.Thread(target=lambda: team.share(wait, 3, 1))
    other.start()
    assert begun.wait(TIMEOUT)
    found = team.share(lambda start, stop: (start, stop), 1000, 1)
    end.set()
    other.join(TIMEOUT)
    assert found == [(0, 1000)]


def test_a_forked_process_has_a_team_of_one(team: Team) -> None:
    from torchfleet.ps.kernels.team import TEAM

    TEAM.resize(2)
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if TEAM.share(lambda start, stop: stop - start, 100, 1) == [100] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert TEAM.share(lambda start, stop: stop - start, 100, 1) == [50, 50]
    finally:
        TEAM.resize(1)


def test_threads_end_when_a_team_becomes_smaller() -> None:
    before = set(threading.enumerate())
    made = Team()
    made.resize(4)
    own = [thread for thread in threading.enumerate() if thread not in before and thread.name == "kernels"]
    assert (made.num_threads, len(own)) == (4, 3)
    made.resize(1)
    for thread in own:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in own)
