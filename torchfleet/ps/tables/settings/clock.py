"""The time that tables go by: the machine's, or what the job says it is, so that a replayed stream ages as it did."""

from __future__ import annotations

import time

from torchfleet.base.monitor.notices import tell

DAY = 86_400
MAX_TIME = (1 << 32) - 1  # seconds since 1970, kept in 32 bits per row
MAX_STEP = 300.0  # seconds by which the wall clock may be set while a server runs: as time services correct it


class Clock:
    """Seconds since 1970, UTC. Shared by the tables of a server.

    The wall clock says when it was made. From then on the machine's own count of seconds goes on, which nobody can set,
    and small corrections of the wall clock are followed. One that jumps by days would make every row look old at once.
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
        """Unless a job sets it, it is this late, until the next call; None: as late as the machine says. A request that
        is applied again on another server finds the time that it found on the first."""
        self._frozen = seconds

    def measured(self) -> int:
        """What the machine says, whatever was set."""
        steady, wall = self._anchor + (_count() - self._counted), time.time()
        if abs(wall - steady) <= MAX_STEP:
            self._anchor, self._counted, self._has_told = wall, _count(), False
            steady = wall
        elif not self._has_told:
            self._has_told = True
            tell(
                f"torchfleet server: the clock of this machine was set by {wall - steady:+,.0f} s while this server "
                "ran. Its tables go on counting from the time before, until the server starts again or fleet.set_time "
                "is called."
            )
        return int(steady)

    @property
    def given(self) -> int | None:
        """What a job says it is; None: it says nothing."""
        return self._set

    @property
    def is_set(self) -> bool:
        """By a job; else it is the machine's."""
        return self._set is not None

    def set(self, seconds: int) -> None:
        """From now on it is this late, until the next call."""
        self._set = seconds


def _count() -> float:
    """Seconds since the machine was started; those during which it slept count as well."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
