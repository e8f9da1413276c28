"""Tells users that kernels are being compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

from torchfleet.base.monitor.notices import tell
from torchfleet.ps.kernels import shared_cache

_LONG = 3.0  # seconds of compiling after which a worker says what it does
_watched: list[bool] = []  # whether this process has called tell_of_compilation


@contextmanager
def telling_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` once if a kernel is compiled in this context. Kernels from the cache on disk are not compiled."""

    class Once(event.Listener):  # type: ignore[misc]
        is_told = False

        def on_start(self, found: event.Event) -> None:
            if not self.is_told:
                self.is_told = True
                tell()

        def on_end(self, found: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", Once()):
        yield


def tell_of_compilation(after: float = _LONG) -> None:
    """From now on, tell the user once when this process has compiled kernels, or waited for kernels that another
    process compiles, for `after` seconds. A worker compiles them when its first steps use them. Only the first call in
    a process, and in those that it forks, does something.
    """
    if _watched:
        return
    _watched.append(True)
    started: list[float] = []

    def look() -> None:
        if not started:
            started.append(time.monotonic())
        elif time.monotonic() - started[0] >= after:
            event.unregister("numba:run_pass", passes)
            shared_cache.watchers.clear()
            tell(
                "fleet: compiling kernels, as at the first start on a machine; on a busy one that takes minutes. "
                "`fleet compile` does it before a job, and later jobs find them on disk"
            )

    class Passes(event.Listener):  # type: ignore[misc]
        """A pass of the compiler takes milliseconds."""

        def on_start(self, found: event.Event) -> None:
            look()

        def on_end(self, found: event.Event) -> None:
            pass

    passes = Passes()
    event.register("numba:run_pass", passes)
    shared_cache.watchers.append(look)
