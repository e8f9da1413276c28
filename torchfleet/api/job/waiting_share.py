"""For what share of its time a worker waits for servers."""

from __future__ import annotations

import time
from collections.abc import Callable

_PERIOD = 1.0  # seconds that a share is taken over


class WaitingShare:
    """The share of the last period, from a count of seconds waited. Any thread may ask."""

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._share: float | None = None
        self._at, self._before = time.monotonic(), 0.0

    def __call__(self) -> float | None:
        """None before the first period is over. Training threads of one worker count together, as one at most."""
        now = time.monotonic()
        if now - self._at >= _PERIOD:
            waited = self._waited()
            self._share = min(1.0, (waited - self._before) / (now - self._at))
            self._at, self._before = now, waited
        return self._share
