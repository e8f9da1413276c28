"""A bounded queue filled by threads: it has an end, passes on errors, and leaves no thread running."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from torchfleet.base.background import BackgroundThreads

Item = TypeVar("Item")
_LOOK = 1.0  # seconds; only a safety net, because every change wakes the waiting threads
_LOOK_IF_HELD = 0.05  # seconds between two questions whether the makers are held up

_open: weakref.WeakSet[Feed[Any]] = weakref.WeakSet()


class Closed(Exception):
    """Raised in the producing threads when the feed is closed; they then end."""


class Feed(Generic[Item]):
    """Any number of threads may iterate over it; every item goes to one of them. Close it when done."""

    def __init__(
        self,
        makers: Iterable[Callable[[Callable[[Item], None]], None]],
        size: int,
        closing: threading.Event | None = None,
    ) -> None:
        """`closing` is set when the makers must end: for makers that wait for something other than queue space."""
        self._items: deque[Item] = deque()
        self._size = size
        self._changed = threading.Condition()
        self._closing = closing or threading.Event()
        self._is_closed = False
        self._threads = BackgroundThreads([partial(self._run, make) for make in makers], on_end=self._count_end)
        self._num_running = len(self._threads)
        _open.add(self)
        with self._changed:  # at exit, another thread may close a feed that is still being opened
            if not self._is_closed:
                self._threads.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            while True:
                if self._items and not self._is_closed:
                    return self._pop()
                self._threads.check()
                if self._is_closed or not self._num_running:
                    raise StopIteration
                self._changed.wait(_LOOK)

    def next_unless(self, is_held: Callable[[], bool], held: Any, end: Any) -> Item | Any:
        """Wait for the next item. Returns `held` if the makers are held up, and `end` at the end."""
        with self._changed:
            while True:
                was_held = is_held()  # before the look at the items: makers put theirs before they are held up
                if self._items and not self._is_closed:
                    return self._pop()
                self._threads.check()
                if self._is_closed or not self._num_running:
                    return end
                if was_held:
                    return held
                self._changed.wait(_LOOK_IF_HELD)

    def take_ready(self) -> Item | None:
        """The next item if there is one now; never waits."""
        with self._changed:
            return self._pop() if self._items and not self._is_closed else None

    @property
    def num_waiting(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """Stop the producing threads, even if they have more items, and wait for their end."""
        with self._changed:
            self._is_closed = True
            self._end_makers()
        self._threads.join()
        _open.discard(self)

    def _pop(self) -> Item:
        self._changed.notify_all()
        return self._items.popleft()

    def _put(self, item: Item) -> None:
        with self._changed:
            while len(self._items) >= self._size and not self._closing.is_set():
                self._changed.wait(_LOOK)
            if self._closing.is_set():
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def _run(self, make: Callable[[Callable[[Item], None]], None]) -> None:
        with contextlib.suppress(Closed):
            make(self._put)

    def _count_end(self) -> None:
        """Called when a maker has ended. After an error all makers end, and iteration raises the error."""
        with self._changed:
            if self._threads.error is not None:
                self._end_makers()
            self._num_running -= 1
            self._changed.notify_all()

    def _end_makers(self) -> None:
        self._closing.set()
        self._changed.notify_all()


@atexit.register
def _close_all() -> None:
    """Stop all threads at exit: a thread inside a kernel while the interpreter shuts down would crash the process."""
    for feed in list(_open):
        feed.close()
