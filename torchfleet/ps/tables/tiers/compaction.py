"""Compaction of the file of a table on two tiers: the rows of its emptiest segment move to the end of the file."""

from __future__ import annotations

from collections.abc import Iterator

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, Keys
from torchfleet.ps.tables.tiers.cold_rows import ColdRows
from torchfleet.ps.tables.tiers.directory import Directory
from torchfleet.ps.tables.tiers.pages import Slots, Words
from torchfleet.ps.tables.tiers.passes import Passes

IDLE_WASTE, MOST_WASTE = 0.25, 0.5  # share of dead records above which the file is compacted: while idle, and always


class Compaction:
    """Moves one block of rows at a time."""

    def __init__(self, cold: ColdRows, directory: Directory, passes: Passes) -> None:
        self._cold, self._directory, self._passes = cold, directory, passes
        self._left: Iterator[int] = iter(())  # the blocks still to be moved of one segment

    def compact_if_needed(self) -> None:
        """Move one block if the file has too many dead records to wait for an idle server."""
        if self._cold.waste > MOST_WASTE:
            self.compact()

    def settle(self) -> bool:
        """Move one block while the server is idle. Returns False if no block is worth moving."""
        return self._cold.waste > IDLE_WASTE and self.compact()

    def compact(self) -> bool:
        """Move the rows of one block, from the segment with the fewest rows in use, to the end of the file. Returns
        False if no block is worth moving, or the disk is full.
        """
        block = next(self._left, None)
        if block is None:
            self._left = iter(self._cold.sparsest() or ())
            block = next(self._left, None)
            if block is None:
                return False
        try:
            self._cold.reserve(self._cold.layout.per_block)
        except TableError:  # the disk is full: a request that needs room says so
            return False
        if not self._cold.has(block):  # checked last, because writes that end in `reserve` may free its segment
            return True
        slots, keys, records = self._cold.scan_block(block)
        self._move(keys, slots, records)
        return True

    def _move(self, keys: Keys, slots: Slots, records: Words) -> None:
        if not len(keys):
            return
        first = self._directory.first_cold
        records[:, KEY_WORDS + 1] = self._passes.moved(keys, self._cold.ordinals(slots), records[:, KEY_WORDS + 1])
        new = self._cold.append(records, int(records[:, KEY_WORDS].max()))
        self._directory.move(keys, slots + first, new + first)
        self._cold.release(slots)
