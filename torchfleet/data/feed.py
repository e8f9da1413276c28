"""Things made by threads for others to take: a bounded queue with an end, errors that arrive, and no thread left."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
_LOOK = 0.1  # seconds between two looks whether somebody has closed it


class Closed(Exception):
    """Nobody takes any more: raised in the threads that make things, which then end."""


class Feed(Generic[Item]):
    """Iterate over it from any number of threads; every item goes to one of them. Close it when done."""

    def __init__(self, makers: Iterable[Callable[[Callable[[Item], None]], None]], size: int) -> None:
        self._queue: queue.Queue[Item] = queue.Queue(size)
        self._closed, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(make,), daemon=True) for make in makers]
        self._num_running = len(self._threads)
        for thread in self._threads:
            thread.start()
        if not self._threads:
            self._ended.set()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        while True:
            ended = self._ended.is_set()  # before the look into the queue: what came before it is in there
            try:
                return self._queue.get(timeout=0 if ended else _LOOK)
            except queue.Empty:
                pass
            if self._error is not None:
                raise self._error  # here and not above: "from None" would take its cause away
            if ended or self._closed.is_set():
                raise StopIteration

    def take_ready(self) -> Item | None:
        """The next item if there is one now: never waits."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    def close(self) -> None:
        """End the threads; also in the middle."""
        self._closed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _put(self, item: Item) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=_LOOK)
            except queue.Full:
                continue
        raise Closed

    def _run(self, make: Callable[[Callable[[Item], None]], None]) -> None:
        try:
            make(self._put)
        except Closed:
            pass
        except BaseException as error:  # must reach whoever iterates, whatever it is
            self._error = self._error or error
            self._closed.set()
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self._ended.set()
