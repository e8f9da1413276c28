"""The time that tables go by: the wall clock, or what the job says it is, so that a replayed stream ages as it did."""

from __future__ import annotations

import time

DAY = 86_400
MAX_TIME = (1 << 32) - 1  # seconds since 1970, kept in 32 bits per row


class Clock:
    """Seconds since 1970, UTC. Shared by the tables of a server."""

    def __init__(self) -> None:
        self._set: int | None = None

    @property
    def now(self) -> int:
        return int(time.time()) if self._set is None else self._set

    @property
    def is_set(self) -> bool:
        """By a job; else it is the wall clock."""
        return self._set is not None

    def set(self, seconds: int) -> None:
        """From now on it is this late, until the next call."""
        self._set = seconds
