"""Lines about what a process waits for: soon at first, then when it changes, and ever more seldom while it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

PERIOD = 5.0  # seconds to the first line, and at least between two
_LONGEST = 60.0  # seconds between two lines of the same text
_GROWTH = 2  # of the time between two lines of the same text


class WaitingLines:
    """Of one wait, from now on."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next, self._again = self._started + PERIOD, 0.0
        self._pause, self._last = PERIOD, list[str]()

    def look(self, waits_for: Callable[[], list[str]]) -> None:
        """Print what is waited for, one thing a line, if it is time. `waits_for` is asked only then."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next, found = now + PERIOD, waits_for()
        if found != self._last:
            self._pause = PERIOD
        elif now < self._again:
            return
        self._last, self._pause = found, min(_LONGEST, self._pause * _GROWTH)
        self._again = now + self._pause - PERIOD / 2  # the look that is nearest to it
        for text in found:
            print(f"waiting for {text}, {now - self._started:.0f} s", flush=True)
