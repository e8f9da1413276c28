"""Background threads. The first error in any of them is raised in the threads that depend on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torchfleet.base.errors import FleetError

Work = Callable[[], None]


class BackgroundThreads:
    """Runs each function in its own thread. Keeps the first error of any of them; `check` raises it.

    An error is kept unchanged. With `failure`, an Exception that is not a FleetError is kept as FleetError("`failure`:
    kind: text"), so that the user learns what failed.
    """

    def __init__(
        self,
        works: Iterable[Work],
        failure: str | None = None,
        on_end: Callable[[], None] = lambda: None,
        daemon: bool = True,
    ) -> None:
        """Each thread calls `on_end` after its function has ended and its error, if any, has been kept."""
        self._failure = failure
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        # Only the thread holds its function, and drops it at the end: this object keeps nothing alive.
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
        """Raise the first error. Every call raises it again."""
        if self._error is not None:
            raise self._error

    def is_alive(self) -> bool:
        """Whether any of the threads is running."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout: float | None = None) -> None:
        """Wait for all started threads except the calling one, up to `timeout` seconds for each."""
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout)

    def _run(self, work: Work, on_end: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # every error must reach the threads that depend on this one
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
