"""The memory that is left: no client may create rows to the end of all of it, in whatever number of tables."""

from __future__ import annotations

from torchfleet.base.cgroups import memory_left
from torchfleet.base.errors import TableError
from torchfleet.ps.tables.rows.memory import physical_bytes

PAUSE = 0.25  # seconds between two looks
SHARE, MOST = 1 / 64, 1 << 30  # of all memory, and bytes: so much is not for new rows


class SpareMemory:
    """Looks now and then."""

    def __init__(self) -> None:
        self._reserve = min(MOST, int(physical_bytes() * SHARE))
        self._looked_at = -PAUSE
        self._left: int | None = None
        self.is_lenient = False  # nobody is refused

    def check(self, now: float) -> None:
        """Raise TableError if there is no memory for new rows. A system that does not say what is left is believed."""
        if now - self._looked_at >= PAUSE:
            self._left, self._looked_at = memory_left(), now
        if self._left is not None and self._left < self._reserve and not self.is_lenient:
            raise TableError(
                f"{self._left:,} bytes of memory are left on this machine or in its container, and {self._reserve:,} "
                "are kept free: no new rows. Use more servers or memory, evict (fleet.shrink), or admit fewer keys."
            )
