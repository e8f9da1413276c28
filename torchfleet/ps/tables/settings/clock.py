"""The time that tables use: the machine's, or one that the job sets, so that a replayed stream ages as it did."""

from __future__ import annotations

import time

from torchfleet.base.monitor.notices import tell

DAY = 86_400
MAX_TIME = (1 << 32) - 1  # seconds since 1970, kept in 32 bits per row
# largest step in seconds of the wall clock that is followed while a server runs: a correction by a time service
MAX_STEP = 300.0


class Clock:
    """Seconds since 1970, UTC. Shared by the tables of a server.

    The clock starts at the wall clock's time. From then on it follows the machine's monotonic clock, which cannot be
    set, and small corrections of the wall clock. A wall clock that jumps by days would make every row look old at once.
    """

    def __init__(self) -> None:
        self._set: int | None = None
        self._frozen: int | None = None
        self._anchor, self._counted = time.time(), _count()
        self._has_told = False

    @property
    def now(self) -> int:
        if self._set is not None:
            return self._set
        return self.measured() if self._frozen is None else self._frozen

    def freeze(self, seconds: int | None) -> None:
        """Fix the measured time to `seconds` until the next call; None: follow the machine again. A time that a job has
        set takes precedence. A request that another server applies again thus sees the time of the first server.
        """
        self._frozen = seconds

    def measured(self) -> int:
        """The machine's time, even if a job has set another."""
        count, wall = _count(), time.time()
        steady = self._anchor + (count - self._counted)
        if abs(wall - steady) <= MAX_STEP:
            self._anchor, self._counted, self._has_told = wall, count, False
            steady = wall
        elif not self._has_told:
            self._has_told = True
            tell(
                f"torchfleet server: the clock of this machine was set by {wall - steady:+,.0f} s while this server "
                "ran. Its tables ignore this change and go on from the previous time until the server restarts or "
                "fleet.set_time is called."
            )
        return int(steady)

    @property
    def given(self) -> int | None:
        """The time that a job has set; None if it has not."""
        return self._set

    @property
    def is_set(self) -> bool:
        """Whether a job has set the time; otherwise it is the machine's."""
        return self._set is not None

    def set(self, seconds: int) -> None:
        """Set the time, until the next call."""
        self._set = seconds


def _count() -> float:
    """Seconds since the machine booted, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
