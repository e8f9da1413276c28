"""The thread that fills the caches of a worker, and its client."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torchfleet.base.background import BackgroundThreads
from torchfleet.ps.worker.client.client import Client

_LOOK = 0.1  # seconds
_UNDER_WAY = 4  # batches whose rows were asked for and have not come

End = Callable[[], None]
Fail = Callable[[BaseException], None]


@dataclass
class Job:
    """Work of a cache: `begin`, and perhaps a second half that it returns. An error of either goes to `fail`."""

    begin: Callable[[Client], End | None]
    fail: Fail
    comes_alone: bool  # begins when all that was given before has ended


class CacheThread:
    """Runs the work of all caches in the order in which it was given."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        """`connect`: makes the thread's client."""
        self._connect = connect
        self._queue: queue.Queue[Job] = queue.Queue()
        self._ending = threading.Event()
        self._threads = BackgroundThreads([self._work], "the thread of the row cache failed")
        self._threads.start()

    def check(self) -> None:
        """Raise an error if the thread has ended."""
        self._threads.check()

    def prepare(self, begin: Callable[[Client], End], fail: Fail) -> None:
        """Call `begin`, and later what it returns, when the replies to its requests are likely to be there."""
        self.check()
        self._queue.put(Job(begin, fail, comes_alone=False))

    def run(self, work: Callable[[Client], None]) -> None:
        """Call `work` after all that was given before, and wait for it. Raises its error."""
        is_done, errors = threading.Event(), list[BaseException]()

        def begin(client: Client) -> None:
            work(client)
            is_done.set()

        self._queue.put(Job(begin, errors.append, comes_alone=True))
        while not is_done.wait(_LOOK) and not errors:
            self.check()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the thread, and its client. What was not begun is dropped."""
        self._ending.set()
        self._threads.join(timeout=10)

    def _work(self) -> None:
        with self._connect() as client:
            under_way: deque[tuple[Job, End]] = deque()
            while not self._ending.is_set():
                try:
                    job = self._queue.get(timeout=0 if under_way else _LOOK)
                except queue.Empty:
                    if under_way:
                        _end(*under_way.popleft())
                    continue
                while under_way and (job.comes_alone or len(under_way) >= _UNDER_WAY):
                    _end(*under_way.popleft())
                try:
                    end = job.begin(client)
                except Exception as error:
                    job.fail(error)
                else:
                    under_way.extend([(job, end)] if end is not None else [])


def _end(job: Job, end: End) -> None:
    try:
        end()
    except Exception as error:
        job.fail(error)
