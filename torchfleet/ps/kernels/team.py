"""Threads that share the work of a kernel call: each takes a range of its items.

Kernels run without Python's lock. Every item is handled by one thread, in the same way as without helpers, so results
do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Work = Callable[[int, int], Result]  # (start, stop) of the items


class _Part(Generic[Result]):
    """A range of a call's items, and what became of it."""

    def __init__(self, work: Work[Result], start: int, stop: int) -> None:
        self._work, self._start, self._stop = work, start, stop
        # a queue of its own: what an interrupted call has left behind must not become a result of the next call
        self._done: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

    def run(self) -> None:
        try:
            self._done.put((self._work(self._start, self._stop), None))
        except BaseException as error:  # `Team.share` raises it
            self._done.put((None, error))

    def outcome(self) -> tuple[Result | None, BaseException | None]:
        """Wait for the end of the work: (its result, or the error that it raised)."""
        return self._done.get()


def _help(given: SimpleQueue[Any]) -> None:
    """A helper's thread: works on the parts that it is given, until None comes."""
    while (part := given.get()) is not None:
        part.run()
        del part  # with the arrays that it refers to


class Team:
    """The calling thread and its helpers. At first there are none, and all work is done by the caller."""

    def __init__(self) -> None:
        self._helpers: list[SimpleQueue[Any]] = []  # what each is given
        self._one = threading.Lock()  # a second thread that calls meanwhile works alone

    @property
    def num_threads(self) -> int:
        return 1 + len(self._helpers)

    def resize(self, num_threads: int) -> None:
        """Use this many threads from now on, the calling one included."""
        with self._one:
            while len(self._helpers) > max(1, num_threads) - 1:
                self._helpers.pop().put(None)
            while len(self._helpers) < num_threads - 1:
                self._helpers.append(SimpleQueue())
                threading.Thread(target=_help, args=self._helpers[-1:], name="kernels", daemon=True).start()

    def share(self, work: Work[Result], num_items: int, fewest: int) -> list[Result]:
        """Call `work` on ranges that together are range(num_items); returns the results in the order of the ranges.

        A thread gets at least `fewest` items: to wake one takes as long as some microseconds of work.
        """
        num = min(self.num_threads, num_items // fewest)
        if num < 2 or not self._one.acquire(blocking=False):
            return [work(0, num_items)]
        try:
            ends = [num_items * i // num for i in range(num + 1)]
            parts = [_Part(work, start, stop) for start, stop in itertools.pairwise(ends[1:])]
            for helper, part in zip(self._helpers, parts, strict=False):
                helper.put(part)
            try:
                first = work(0, ends[1])
            finally:  # also after an error: nothing works on the caller's arrays when it goes on
                outcomes = [part.outcome() for part in parts]
            for _, error in outcomes:
                if error is not None:
                    raise error
            return [first, *(result for result, _ in outcomes)]  # type: ignore[list-item]
        finally:
            self._one.release()

    def forget(self) -> None:
        """Called in the child after a fork: it does not have the helpers' threads."""
        self._helpers, self._one = [], threading.Lock()


TEAM = Team()
os.register_at_fork(after_in_child=TEAM.forget)
