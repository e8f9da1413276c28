"""The thread that fills the caches of a worker, and its client."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.cache.write_back import CLOSED
from torchfleet.ps.worker.client.client import Client

_LOOK = 0.1  # seconds
_UNDER_WAY = 4  # groups of batches whose rows were requested and have not arrived
_TOGETHER = 4  # batches of a group, on average over the groups that begin at once

End = Callable[[], None]


class Preparer(Protocol):
    """A cache, as its thread sees it."""

    def begin(self, client: Client, batches: list[Any]) -> End:
        """Do the first half of the preparation of batches, and return the second half. May be repeated after errors."""

    def fail(self, batches: list[Any], error: BaseException) -> None:
        """Store the error of either half in the batches."""


@dataclass
class Alone:
    """Work that begins when all earlier work has ended."""

    work: Callable[[Client], None]
    errors: list[BaseException]
    is_done: threading.Event


class CacheThread:
    """Runs the work of all caches; the work of each cache runs in the order in which it was given. Batches that wait in
    the queue at the same time are prepared together, with as many calls to the device and the servers as for one batch.
    """

    def __init__(self, connect: Callable[[], Client]) -> None:
        """`connect`: makes the thread's client."""
        self._connect = connect
        self._queue: queue.Queue[tuple[Preparer, Any] | Alone] = queue.Queue()
        self._gathered: list[tuple[Preparer, Any]] | None = None  # within `together`
        self._ending = threading.Event()
        self._under_way: deque[tuple[Preparer, list[Any], End]] = deque()
        self._threads = BackgroundThreads([self._work], "the thread of the row cache failed")
        self._threads.start()

    def check(self) -> None:
        """Raise the thread's error if it has failed, or an error if it was closed: nothing is prepared any more."""
        self._threads.check()
        if self._ending.is_set():
            raise FleetError(CLOSED)

    def prepare(self, cache: Preparer, batch: Any) -> None:
        """Have the thread call `cache.begin`, and later, when the replies should have arrived, what that returned."""
        self.check()
        if self._gathered is None:
            self._queue.put((cache, batch))
        else:
            self._gathered.append((cache, batch))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Hold back the batches that are prepared in this context until it ends, so that they begin together. For one
        thread at a time.
        """
        self._gathered = []
        try:
            yield
        finally:
            gathered, self._gathered = self._gathered, None
            for given in gathered:
                self._queue.put(given)

    def run(self, work: Callable[[Client], None]) -> None:
        """Have the thread call `work` after all earlier work, and wait for it. Raises the error of `work`."""
        alone = Alone(work, [], threading.Event())
        self._queue.put(alone)
        while not alone.is_done.wait(_LOOK):
            self.check()
        if alone.errors:
            raise alone.errors[0]

    def close(self) -> None:
        """End the thread and close its client. Work that has not ended is dropped; its waiters get an error."""
        self._ending.set()
        self._threads.join(timeout=10)

    def _work(self) -> None:
        with self._connect() as client:
            while not self._ending.is_set():
                try:
                    given = self._queue.get(timeout=0 if self._under_way else _LOOK)
                except queue.Empty:
                    if self._under_way:
                        self._end_oldest()
                    continue
                if isinstance(given, Alone):
                    self._run(client, given)
                else:
                    self._begin(client, given)

    def _run(self, client: Client, alone: Alone) -> None:
        while self._under_way:
            self._end_oldest()
        try:
            alone.work(client)
        except Exception as error:
            alone.errors.append(error)
        alone.is_done.set()

    def _begin(self, client: Client, first: tuple[Preparer, Any]) -> None:
        """Begin this batch together with batches that wait behind it in the queue."""
        groups = {id(first[0]): (first[0], [first[1]])}
        following: Alone | None = None
        while following is None and sum(len(batches) for _, batches in groups.values()) < _TOGETHER * len(groups):
            try:
                given = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(given, Alone):
                following = given
            else:
                groups.setdefault(id(given[0]), (given[0], []))[1].append(given[1])
        for cache, batches in groups.values():
            self._begin_together(client, cache, batches)
        if following is not None:
            self._run(client, following)

    def _begin_together(self, client: Client, cache: Preparer, batches: list[Any]) -> None:
        while len(self._under_way) >= _UNDER_WAY:
            self._end_oldest()
        try:
            self._under_way.append((cache, batches, cache.begin(client, batches)))
        except Exception as error:
            if len(batches) == 1:
                cache.fail(batches, error)
                return
            for batch in batches:  # only one of them may be at fault
                self._begin_together(client, cache, [batch])

    def _end_oldest(self) -> None:
        cache, batches, end = self._under_way.popleft()
        try:
            end()
        except Exception as error:
            cache.fail(batches, error)
