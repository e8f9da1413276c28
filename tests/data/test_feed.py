"""Feeds: a bounded queue between threads, errors that arrive, no item twice or lost, and no thread left behind."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import jobs
from support.searches import examples

from torchfleet.data import feed as feed_module
from torchfleet.data.feed import Feed

Put = Callable[[int], None]
SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    jobs.wait_until(lambda: not set(threading.enumerate()) - before, "all threads have ended", SECONDS)


@pytest.fixture(scope="module", autouse=True)
def quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "_LOOK", 0.005)
        yield


def numbers(*values: int) -> Callable[[Put], None]:
    """A maker of these."""

    def make(put: Put) -> None:
        for value in values:
            put(value)

    return make


@settings(max_examples=examples(40))
@given(counts=st.lists(st.integers(0, 30), max_size=5), size=st.integers(1, 10), num_takers=st.integers(1, 4))
def test_every_item_goes_to_exactly_one_taker(counts: list[int], size: int, num_takers: int) -> None:
    serial = itertools.count()
    shares = [[next(serial) for _ in range(count)] for count in counts]
    feed = Feed([numbers(*share) for share in shares], size)
    taken = jobs.in_threads(lambda i: list(feed), num_takers)
    feed.close()
    assert sorted(itertools.chain(*taken)) == sorted(itertools.chain(*shares))
    for own in taken:  # what one maker made never overtakes itself
        for share in shares:
            assert [item for item in own if item in share] == sorted(set(own) & set(share))


def test_one_maker_and_one_taker_keep_the_order() -> None:
    assert list(Feed([numbers(*range(500))], 3)) == list(range(500))


def test_without_makers_it_is_over_at_once() -> None:
    feed: Feed[int] = Feed([], 1)
    assert list(feed) == []
    assert list(feed) == []
    feed.close()


def test_makers_wait_when_the_queue_is_full() -> None:
    made: list[int] = []

    def make(put: Put) -> None:
        for i in range(100):
            made.append(i)
            put(i)

    feed = Feed([make, make], 3)
    jobs.wait_until(lambda: len(made) == 3 + 2, "the queue is full and both makers hold one more", SECONDS)
    time.sleep(0.05)
    assert len(made) == 5
    assert feed.num_waiting == 3
    next(feed)
    jobs.wait_until(lambda: len(made) == 6, "one is taken, one more is made", SECONDS)
    time.sleep(0.05)
    assert len(made) == 6
    feed.close()


def test_what_was_made_before_an_error_comes_first_and_then_the_error() -> None:
    def make(put: Put) -> None:
        put(1)
        put(2)
        raise ValueError("the third is bad")

    feed = Feed([make], 10)
    assert next(feed) == 1
    assert next(feed) == 2
    for _ in range(2):  # again for who asks again
        with pytest.raises(ValueError, match="the third is bad"):
            next(feed)
    feed.close()


def test_an_error_ends_the_other_makers_that_wait_for_room() -> None:
    full = threading.Event()

    def endless(put: Put) -> None:
        for i in itertools.count():
            put(i)
            full.set()

    def fails(put: Put) -> None:
        assert full.wait(SECONDS)
        raise ValueError("bad")

    feed = Feed([endless, fails, endless], 1)
    with pytest.raises(ValueError, match="bad"):
        list(feed)
    feed.close()


def test_an_error_reaches_every_taker() -> None:
    is_time = threading.Event()

    def make(put: Put) -> None:
        assert is_time.wait(SECONDS)
        raise ValueError("bad")

    feed = Feed([make], 1)
    with ThreadPoolExecutor(3) as pool:
        takers = [pool.submit(list, feed) for _ in range(3)]
        is_time.set()
        for taker in takers:
            with pytest.raises(ValueError, match="bad"):
                taker.result(SECONDS)
    feed.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), MemoryError()])
def test_an_error_of_any_kind_arrives(error: BaseException) -> None:
    def make(put: Put) -> None:
        raise error

    feed = Feed([make], 1)
    with pytest.raises(type(error)):
        next(feed)
    feed.close()


@pytest.mark.parametrize("num_taken", [0, 1, 7])
@pytest.mark.parametrize("num_makers", [1, 4])
def test_closing_in_the_middle_ends_all_threads(num_taken: int, num_makers: int) -> None:
    before = set(threading.enumerate())

    def endless(put: Put) -> None:
        for i in itertools.count():
            put(i)

    feed = Feed([endless] * num_makers, 2)
    for _ in range(num_taken):
        next(feed)
    feed.close()
    assert set(threading.enumerate()) <= before
    feed.close()  # again does no harm


def test_closing_ends_takers_that_wait() -> None:
    over = threading.Event()

    def never(put: Put) -> None:
        assert over.wait(SECONDS)

    feed = Feed([never], 2)
    with ThreadPoolExecutor(2) as pool:
        takers = [pool.submit(list, feed) for _ in range(2)]
        closer = threading.Thread(target=feed.close)
        closer.start()
        for taker in takers:
            assert taker.result(SECONDS) == []
        over.set()
        closer.join(SECONDS)
        assert not closer.is_alive()


def test_a_maker_that_cleans_up_does_so_when_the_feed_is_closed() -> None:
    cleaned = []

    def make(put: Put) -> None:
        try:
            for i in itertools.count():
                put(i)
        finally:
            cleaned.append(True)

    feed = Feed([make, make], 1)
    next(feed)
    feed.close()
    assert cleaned == [True, True]


def test_an_error_while_it_is_being_closed_is_not_lost_on_who_takes_afterwards() -> None:
    def make(put: Put) -> None:
        try:
            for i in itertools.count():
                put(i)
        finally:
            raise ValueError("could not clean up")

    feed = Feed([make], 1)
    next(feed)
    feed.close()
    with pytest.raises(ValueError, match="could not clean up"):
        list(feed)
