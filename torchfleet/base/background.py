"""Threads beside the main work, whose first error is raised in the threads that count on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torchfleet.base.errors import FleetError

Work = Callable[[], None]


class BackgroundThreads:
    """Runs functions, each in a thread of its own. The first error of any of them is kept; `check` raises it.

    An error is kept as it is. With `failure`, an Exception that is no FleetError is kept as
    FleetError("`failure`: kind: text"), so that a user learns what it was that failed.
    """

    def __init__(
        self,
        works: Iterable[Work],
        failure: str | None = None,
        on_end: Callable[[], None] = lambda: None,
        daemon: bool = True,
    ) -> None:
        """`on_end` is called in each thread when its function has ended, its error, if any, being kept by then."""
        self._failure = failure
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        # What a thread calls belongs to the thread alone, which drops it at its end: nothing is kept alive from here.
        self._threads = [threading.Thread(target=self._run, args=(work, on_end), daemon=daemon) for work in works]

    def __len__(self) -> int:
        return len(self._threads)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def error(self) -> BaseException | None:
        return self._error

    def check(self) -> None:
        """Raise the first error, again at every call."""
        if self._error is not None:
            raise self._error

    def is_alive(self) -> bool:
        """Whether any of the threads is running."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of all threads that were started, `timeout` seconds for each; not for the caller's own."""
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout)

    def _run(self, work: Work, on_end: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # must reach whoever counts on this thread, whatever it is
            self._keep(error)
        finally:
            on_end()

    def _keep(self, error: BaseException) -> None:
        if self._failure is not None and isinstance(error, Exception) and not isinstance(error, FleetError):
            cause, error = error, FleetError(f"{self._failure}: {type(error).__name__}: {error}")
            error.__cause__ = cause
        with self._lock:
            if self._error is None:
                self._error = error
