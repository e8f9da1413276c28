"""What unforeseen lookups cost: the share of its time that a worker waited for their rows."""

from __future__ import annotations

import time
from collections.abc import Callable

_LEARNING = 2  # steps: the lookups of the first two calls are never foreseen (docs/lookups.md)


class UnforeseenCost:
    """Seconds that a worker waited for unforeseen rows, of all seconds since its second step."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._num_steps = now, 0
        self._since: float | None = None  # when the second step was made
        self._waited = 0.0

    def step_made(self) -> None:
        self._num_steps += 1
        if self._num_steps == _LEARNING:
            self._since = self._now()

    def waited(self, seconds: float) -> None:
        """Count a wait for unforeseen rows."""
        if self._since is not None:
            self._waited += seconds

    @property
    def share(self) -> float:
        """The share of the time since the second step; 0 before it. Waits of several threads add up, to 1 at most."""
        passed = 0.0 if self._since is None else self._now() - self._since
        return min(1.0, self._waited / passed) if passed > 0 else 0.0
