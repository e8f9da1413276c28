"""The rows of a table on two tiers that changed since the last save.

Each row has the number of the interval between two saves in which it changed last; on disk it is in the row's record.
"""

from __future__ import annotations

from torchfleet.ps.tables.rows.keymap import Rows
from torchfleet.ps.tables.rows.tracking import GoneKeys
from torchfleet.ps.tables.tiers.tiers import Tiers


class TieredTracking(GoneKeys):
    """The contract of Tracking without `changed`: a pass over the rows reads only blocks that changed since `since`."""

    def __init__(self, tiers: Tiers) -> None:
        super().__init__()
        self._tiers = tiers
        self.since = tiers.interval  # the first interval that the current save must write
        self._next = tiers.interval  # the first interval that the next save must write, if the current one is committed

    def mark(self, rows: Rows) -> None:
        """Mark these rows as changed. Numbers may repeat; negative ones are ignored."""
        self._tiers.mark(rows)

    def begin(self, is_committed: bool) -> None:
        """Begin a save, see Tracking.begin."""
        super().begin(is_committed)
        if is_committed:
            self.since = self._next
        self._tiers.interval += 1
        self._next = self._tiers.interval

    def mark_all(self) -> None:
        """Let the current save and the next one write all rows."""
        self.since = self._next = 0
