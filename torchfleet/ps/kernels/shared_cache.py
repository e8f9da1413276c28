"""A cache of compiled kernels on disk that processes share while they compile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from typing import Any

from numba.core.caching import FunctionCache

_PATIENCE = 60.0  # seconds to wait for a kernel that another process compiles; its compilation may have failed
_PAUSE = 0.02  # seconds between two tries
# Bound here: where clocks are simulated, time.sleep is virtual, and another process compiles in real time.
_monotonic, _sleep = time.monotonic, time.sleep
watchers: list[Callable[[], None]] = []  # called while this process waits for a kernel that another one compiles
takes_locks = True  # False in a process of low priority, for which no other is to wait


class SharedCache(FunctionCache):  # type: ignore[misc]
    """Lets one process at a time compile a kernel. A process that needs the same kernel waits, and loads the result.

    Kernels call each other without circles, so processes that wait for each other's kernels do not block.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._lock: int | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None and self._lock is None and takes_locks:
            self._acquire()
            found = super().load_overload(sig, target_context)  # another process may have saved it meanwhile
            if found is not None:
                self._release()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        finally:
            self._release()

    def _acquire(self) -> None:
        with contextlib.suppress(OSError):  # a file system without locks: every process compiles
            self._impl.locator.ensure_cache_path()
            path = os.path.join(self.cache_path, f"{self._impl.filename_base}.lock")
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            until = _monotonic() + _PATIENCE
            while _monotonic() < until:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    for look in watchers:
                        look()
                    _sleep(_PAUSE)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
