"""The rows of a table on two tiers that changed since the last save.

Each row has the number of the interval between two saves in which it changed last; on disk it is in the row's record.
"""

from __future__ import annotations

from torchfleet.ps.tables.rows.keymap import Keys, Rows
from torchfleet.ps.tables.rows.tracking import Gone
from torchfleet.ps.tables.tiers.tiers import Tiers


class TieredTracking:
    """The contract of Tracking without `changed`: a pass over the rows reads only blocks that changed since `since`."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._current, self._under_way = Gone(), Gone()
        self.since = tiers.interval  # the first interval that the current save must write
        self._next = tiers.interval  # and the next one, if the current one is committed

    def mark(self, rows: Rows) -> None:
        """Mark these rows as changed. Numbers may repeat; negative ones are ignored."""
        self._tiers.mark(rows)

    def note_gone(self, keys: Keys) -> None:
        """Record that these keys lost their rows. Keys are copied."""
        if len(keys):
            self._current.note(keys.copy())

    def begin(self, is_committed: bool) -> None:
        """Begin a save, see Tracking.begin."""
        if is_committed:
            self._under_way, self.since = self._current, self._next
        else:
            self._under_way.note(self._current.distinct())
        self._current = Gone()
        self._tiers.interval += 1
        self._next = self._tiers.interval

    def mark_all(self) -> None:
        """The current save and the next one must write all rows."""
        self.since = self._next = 0

    @property
    def gone(self) -> Keys:
        """Distinct keys that the current save must write as deleted, see Tracking.gone."""
        return self._under_way.distinct()

    @property
    def gone_since(self) -> Keys:
        """As `gone`, for the next save, so far."""
        return self._current.distinct()
