"""Threads beside the main work: their first error is raised in the thread that uses them."""

from __future__ import annotations

import threading

import pytest
from support.messages import naming

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import DataError, FleetError

SECONDS = 60.0


def fail(error: BaseException) -> None:
    raise error


def ended(threads: BackgroundThreads) -> BackgroundThreads:
    threads.start()
    threads.join(SECONDS)
    return threads


def test_without_an_error_check_says_nothing() -> None:
    done: list[int] = []
    threads = ended(BackgroundThreads([lambda: done.append(1), lambda: done.append(2)]))
    threads.check()
    assert sorted(done) == [1, 2]
    assert threads.error is None
    assert len(threads) == 2


def test_an_error_of_ours_is_raised_as_it_is_and_again() -> None:
    error = DataError("line 7")
    threads = ended(BackgroundThreads([lambda: fail(error)], "reading failed"))
    for _ in range(2):
        with pytest.raises(DataError) as found:
            threads.check()
        assert found.value is error


def test_another_error_is_wrapped_with_what_failed() -> None:
    threads = ended(BackgroundThreads([lambda: fail(ZeroDivisionError("our own mistake"))], "reading failed"))
    with pytest.raises(FleetError, match=naming("ZeroDivisionError: our own mistake")) as found:
        threads.check()
    assert isinstance(found.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("error", [ValueError("as it is"), KeyboardInterrupt()])
def test_without_a_text_every_error_is_raised_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as found:
        ended(BackgroundThreads([lambda: fail(error)])).check()
    assert found.value is error


def test_an_error_that_is_not_an_exception_is_never_wrapped() -> None:
    with pytest.raises(SystemExit):
        ended(BackgroundThreads([lambda: fail(SystemExit(3))], "reading failed")).check()


def test_the_first_error_stays() -> None:
    has_failed = threading.Event()

    def fail_later() -> None:
        assert has_failed.wait(SECONDS)
        raise ValueError("the second")

    works = [fail_later, lambda: fail(ValueError("the first"))]
    calls: list[bool] = []

    def on_end() -> None:
        calls.append(threads.error is not None)
        has_failed.set()

    threads = BackgroundThreads(works, on_end=on_end)
    ended(threads)
    with pytest.raises(ValueError, match="the first"):
        threads.check()
    assert calls == [True, True], "on_end is called once per thread, when the error can be seen"


def test_on_end_is_called_without_an_error_too() -> None:
    calls: list[bool] = []
    threads = BackgroundThreads([lambda: None], on_end=lambda: calls.append(threads.error is not None))
    ended(threads)
    assert calls == [False]


def test_join_waits_neither_for_threads_never_started_nor_for_its_own() -> None:
    BackgroundThreads([lambda: None]).join()
    threads: BackgroundThreads
    threads = BackgroundThreads([lambda: threads.join(SECONDS)])
    ended(threads).check()


def test_they_are_alive_while_any_of_them_runs() -> None:
    may_end = threading.Event()
    threads = BackgroundThreads([lambda: None, lambda: fail(ValueError()) if not may_end.wait(SECONDS) else None])
    assert not threads.is_alive()
    threads.start()
    assert threads.is_alive()
    may_end.set()
    threads.join(SECONDS)
    assert not threads.is_alive()
    threads.check()
