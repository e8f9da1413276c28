"""Attempts that follow each other: ranks meet in the newest one, and an error is raised if no rank is replaced."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from torchfleet.collective.elastic import attempts
from torchfleet.collective.elastic.attempts import Attempts, run

SECONDS = 20


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    made = HashStore()
    monkeypatch.setattr(Attempts, "of_launcher", classmethod(lambda cls: cls(made, 1)))
    monkeypatch.setattr(attempts, "_NOTICE", 0.2)
    return made


def test_ranks_meet_in_the_newest_attempt() -> None:
    """One rank waits in attempt 0 for another that is replaced: both meet in attempt 1."""
    store = HashStore()
    ranks = [Attempts(store, 2) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        early: Future[int] = pool.submit(ranks[0].meet)
        while not Attempts(store, 2).may_go_on():
            pass
        assert Attempts(store, 2).begin_next() == 1
        late = pool.submit(ranks[1].meet)
        assert [early.result(SECONDS), late.result(SECONDS)] == [1, 1]


def test_a_rank_that_has_finished_trains_again_with_one_that_is_replaced() -> None:
    store = HashStore()
    ranks = [Attempts(store, 2) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        finished = pool.submit(ranks[0].finish, 0)
        Attempts(store, 2).begin_next()
        assert not finished.result(SECONDS)
        assert [rank.result(SECONDS) for rank in [pool.submit(rank.finish, 1) for rank in ranks]] == [True, True]


def test_a_launcher_replaces_no_rank_of_other_scripts_nor_after_the_end() -> None:
    store = HashStore()
    launcher, rank = Attempts(store, 1), Attempts(store, 1)
    assert not launcher.may_go_on()  # fleet.elastic.run was never called
    rank.meet()
    assert launcher.may_go_on()
    rank.finish(0)
    assert not launcher.may_go_on()


def failing(
    times: int, then: Callable[[], object], error: type[Exception] = RuntimeError
) -> tuple[list[int], Callable[[], None]]:
    """(a list that grows with every call, a function that fails that often, after `then`)."""
    calls: list[int] = []

    def train() -> None:
        calls.append(len(calls))
        if len(calls) <= times:
            then()
            raise error("a rank is gone")

    return calls, train


def test_training_begins_again_when_a_rank_was_replaced(store: HashStore) -> None:
    left: list[str] = []
    calls, train = failing(2, Attempts(store, 1).begin_next)
    run(train, lambda: left.append("left"))
    assert (len(calls), left) == (3, ["left", "left"])


@pytest.mark.parametrize("error", [RuntimeError, KeyError])
def test_an_error_is_raised_if_no_rank_was_replaced(store: HashStore, error: type[Exception]) -> None:
    calls, train = failing(1, lambda: None, error)
    with pytest.raises(error, match="a rank is gone"):
        run(train, lambda: None)
    assert len(calls) == 1


def test_without_a_launcher_training_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempts, "of_launcher", classmethod(lambda cls: None))
    calls, train = failing(0, lambda: None)
    run(train, lambda: None)
    assert len(calls) == 1
