"""A histogram of step durations."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds, bounds of buckets


class StepTimes:
    """Counts the times between steps. Any number of training threads may record theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts, self._total = [0] * (len(BOUNDS) + 1), 0.0
        self._last: float | None = None

    def note(self) -> None:
        """Record the end of a step. The first step is not timed, since the start of the job precedes it."""
        now = time.monotonic()
        with self._lock:
            last, self._last = self._last, now
            if last is not None:
                self._counts[bisect_left(BOUNDS, now - last)] += 1
                self._total += now - last

    def taken(self) -> tuple[list[int], float]:
        """Steps by bucket, the last of which has no upper bound, and the total seconds of all steps."""
        with self._lock:
            return list(self._counts), self._total
