"""Passes over all rows of a table on two tiers, while rows move between memory and disk: saves, copies, summaries.

A row that exists throughout comes exactly once. A pass first reads the records on disk in the order in which they were
appended, then the rows in memory by their number, then the records that were appended meanwhile, and at last the rows
that moved past it: from a place that it had not reached to a place that it had left behind. Every row in memory, and
every record that was appended since the pass began, has a bit for the pass: whether it has come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchfleet.ps.tables.rows.keymap import Keys, Rows

MOST_PASSES = 8
Ordinals = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint32]


@dataclass(slots=True)
class Pass:
    """Where one pass is."""

    lane: int  # the number of its bit
    begun_at: int  # records from this ordinal on have its bit
    until: int  # the ordinal at which the present scan of the disk ends
    cold: int = 0  # records before this ordinal have come
    hot: int = 0  # rows in memory with lower numbers have come, or are noted in `late`
    is_last_scan: bool = False
    late: list[Keys] = field(default_factory=list)

    @property
    def bit(self) -> np.uint32:
        bit: np.uint32 = np.uint32(1 << self.lane)
        return bit

    def has_come(self, ordinals: Ordinals, bits: Bits) -> npt.NDArray[np.bool_]:
        """Which of these records have come."""
        found: npt.NDArray[np.bool_] = (ordinals < self.cold) | ((ordinals >= self.begun_at) & (bits & self.bit > 0))
        return found


class Passes:
    """The passes under way, and the bits of the rows in memory."""

    def __init__(self, max_rows: int, bits: Bits) -> None:
        self._bits = bits[:max_rows]
        self._lanes: dict[int, Pass] = {}  # that have begun
        self._reserved: set[int] = set()

    def reserve(self) -> int | None:
        """A lane for a new pass; None if too many are under way. Its bits must be cleared before it begins."""
        lane = next((lane for lane in range(MOST_PASSES) if lane not in self._reserved), None)
        if lane is not None:
            self._reserved.add(lane)
        return lane

    def clear(self, lane: int, rows: slice) -> None:
        """Clear the bits of these rows. Until the pass begins, no row gets its bit."""
        self._bits[rows] &= ~np.uint32(1 << lane)

    def begin(self, lane: int, next_ordinal: int) -> Pass:
        """Begin the pass of this lane."""
        made = self._lanes[lane] = Pass(lane, next_ordinal, next_ordinal)
        return made

    def end(self, lane: int) -> None:
        """End the pass of this lane, and free the lane."""
        self._lanes.pop(lane, None)
        self._reserved.discard(lane)

    def brought(self, keys: Keys, rows: Rows, ordinals: Ordinals, bits: Bits) -> None:
        """Note that records have moved to these rows in memory."""
        self._bits[rows] = self._carried(keys, ordinals, bits, rows)

    def moved(self, keys: Keys, ordinals: Ordinals, bits: Bits) -> Bits:
        """Note that records move to the end of the file. Returns their bits there."""
        return self._carried(keys, ordinals, bits, None)

    def _carried(self, keys: Keys, ordinals: Ordinals, bits: Bits, rows: Rows | None) -> Bits:
        out = np.zeros(len(keys), np.uint32)
        for one in self._lanes.values():
            has_come = one.has_come(ordinals, bits)
            is_passed = np.full(len(keys), one.is_last_scan) if rows is None else rows < one.hot
            is_late = is_passed & ~has_come
            if is_late.any():
                one.late.append(keys[is_late])
            out |= np.where(has_come | is_late, one.bit, np.uint32(0))
        return out

    def bits_of(self, rows: Rows) -> Bits:
        """The bits of rows in memory, which move to the end of the file with them."""
        return self._bits[rows]

    def forget(self, rows: Rows) -> None:
        """Clear the bits of these rows, which are new."""
        self._bits[rows] = 0

    def take_hot(self, one: Pass, rows: Rows) -> Rows:
        """The rows among these that have not come. Marks them as having come."""
        fresh: Rows = rows[self._bits[rows] & one.bit == 0]
        self._bits[fresh] |= one.bit
        return fresh
