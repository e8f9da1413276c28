"""How busy a loop is: the share of time in which its thread computes."""

from __future__ import annotations

import time

_PERIOD = 1.0  # seconds that a share is taken over


class LoopLoad:
    """Measures the thread that calls `look`, which must be one and the same."""

    def __init__(self) -> None:
        self.busy: float | None = None  # of the last period; None before the first is over
        self._wall = self._cpu = 0.0

    def look(self) -> None:
        """Often: it costs a look at the clock, and once in a period one at the thread's time."""
        now = time.monotonic()
        if now - self._wall < _PERIOD:
            return
        cpu = time.thread_time()
        if self._wall:
            self.busy = min(1.0, (cpu - self._cpu) / (now - self._wall))
        self._wall, self._cpu = now, cpu
