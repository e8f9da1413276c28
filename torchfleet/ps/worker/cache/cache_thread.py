"""The thread that fills the caches of a worker, and its client."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from torchfleet.base.background import BackgroundThreads
from torchfleet.ps.worker.client.client import Client

_LOOK = 0.1  # seconds
_UNDER_WAY = 4  # batches whose rows were asked for and have not come

End = Callable[[], None]


class CacheThread:
    """Runs the work of all caches in the order in which it was given."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        """`connect`: makes the thread's client."""
        self._connect = connect
        self._queue: queue.Queue[tuple[Callable[[Client], End | None], threading.Event | None]] = queue.Queue()
        self._ending = threading.Event()
        self._threads = BackgroundThreads([self._work], "the thread of the row cache failed")
        self._threads.start()

    def check(self) -> None:
        """Raise the error of the thread."""
        self._threads.check()

    def prepare(self, begin: Callable[[Client], End]) -> None:
        """Call `begin`, and what it returns when the replies to its requests are likely to be there."""
        self.check()
        self._queue.put((begin, None))

    def run(self, work: Callable[[Client], None]) -> None:
        """Call `work` after all that was given before has ended, and wait for it."""
        is_done = threading.Event()
        self._queue.put((work, is_done))
        while not is_done.wait(_LOOK):
            self.check()
        self.check()

    def close(self) -> None:
        """End the thread, and its client. What was not begun is dropped."""
        self._ending.set()
        self._threads.join(timeout=10)

    def _work(self) -> None:
        with self._connect() as client:
            under_way: deque[End] = deque()
            while not self._ending.is_set():
                try:
                    work, is_done = self._queue.get(timeout=0 if under_way else _LOOK)
                except queue.Empty:
                    if under_way:
                        under_way.popleft()()
                    continue
                while under_way and (is_done is not None or len(under_way) >= _UNDER_WAY):
                    under_way.popleft()()
                end = work(client)
                if end is not None:
                    under_way.append(end)
                if is_done is not None:
                    is_done.set()
