"""The rows that changed and the keys that lost their rows since the last save: what a delta writes.

There are two generations. A save writes one of them; changes made during the save belong to the next.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import marks
from torchfleet.ps.kernels.marks import PAGE_ROWS, PAGE_WORDS
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.tables.rows.keymap import Keys, Rows
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.rows.packed_map import PackedMap

_COMPACT_AT = 1 << 16  # keys


class AnyTracking(Protocol):
    """What every kind of table needs of its tracking."""

    def mark(self, rows: Rows) -> None:
        """Mark these rows as changed. Numbers may repeat; negative ones are ignored."""

    def note_gone(self, keys: Keys) -> None:
        """Record that these keys lost their rows. Keys are copied."""

    def begin(self, is_committed: bool) -> None:
        """Begin a save, which must write everything that changed since the previous save began."""

    @property
    def gone(self) -> Keys:
        """Distinct keys that the current save must write as deleted."""

    @property
    def gone_since(self) -> Keys:
        """As `gone`, for the next save, so far."""


class Gone:
    """Keys that lost their rows between two saves."""

    def __init__(self) -> None:
        self._pieces: list[Keys] = [np.empty(0, np.uint64)]
        self._num = 0
        self._is_distinct = True  # a single piece without repeats
        self._compact_at = _COMPACT_AT

    def note(self, keys: Keys) -> None:
        self._pieces.append(keys)
        self._num += len(keys)
        self._is_distinct = False
        if self._num > self._compact_at:
            self.distinct()
            self._compact_at = max(_COMPACT_AT, 2 * self._num)

    def distinct(self) -> Keys:
        if not self._is_distinct:
            # a copy: a view would keep the whole buffer alive
            self._pieces = [unique(np.concatenate(self._pieces))[0].copy()]
            self._num = len(self._pieces[0])
            self._is_distinct = True
        return self._pieces[0]

    @property
    def num_bytes(self) -> int:
        return 8 * self._num


class GoneKeys:
    """The keys that lost their rows, of two generations; the kinds of tracking add the rows that changed."""

    def __init__(self) -> None:
        self._gone, self._gone_under_way = Gone(), Gone()

    def note_gone(self, keys: Keys) -> None:
        """Record that these keys lost their rows. Keys are copied."""
        if len(keys):
            self._gone.note(keys.copy())

    def begin(self, is_committed: bool) -> None:
        """As AnyTracking.begin."""
        if is_committed:
            self._gone_under_way = self._gone
        else:
            self._gone_under_way.note(self._gone.distinct())
        self._gone = Gone()

    @property
    def gone(self) -> Keys:
        """Distinct keys that the current save must write as deleted, in the order of their deletion.

        A key that got a row again is included; the code that writes the keys must leave it out.
        """
        return self._gone_under_way.distinct()

    @property
    def gone_since(self) -> Keys:
        """As `gone`, for the next save, so far."""
        return self._gone.distinct()

    @property
    def num_bytes(self) -> int:
        return self._gone.num_bytes + self._gone_under_way.num_bytes


class _Generation:
    """The rows that changed between two saves. Reserves address space for all rows, and uses memory only for marked
    ones.
    """

    def __init__(self, max_rows: int) -> None:
        num_pages = -(-max_rows // PAGE_ROWS)
        self.words: npt.NDArray[np.uint64] = Memory(8 * PAGE_WORDS * num_pages).array(np.uint64)
        self.pages: npt.NDArray[np.uint8] = np.zeros(num_pages, np.uint8)

    @property
    def num_bytes(self) -> int:
        return 8 * PAGE_WORDS * int(np.count_nonzero(self.pages)) + len(self.pages)


class Tracking(GoneKeys):
    """Tracks rows with numbers below `max_rows`. Saves run one after another; each reports how the last one ended."""

    def __init__(self, max_rows: int) -> None:
        super().__init__()
        self._max_rows = max_rows
        self._current = _Generation(max_rows)
        self._under_way = _Generation(max_rows)

    def mark(self, rows: Rows) -> None:
        """Mark these rows as changed. Numbers may repeat; negative ones are ignored."""
        num_beyond = marks.mark(self._current.words, self._current.pages, self._max_rows, rows)
        if num_beyond:
            raise IndexError(f"{num_beyond} of {len(rows)} row numbers are {self._max_rows:,} or more. This is a bug.")

    def begin(self, is_committed: bool) -> None:
        """Begin a save, which must write everything that changed since the previous save began.

        `is_committed`: the previous save is durable, and its changes are forgotten. Otherwise this save must write them
        as well, which takes a pass over the changed rows.
        """
        fresh = _Generation(self._max_rows)
        super().begin(is_committed)
        if is_committed:
            self._under_way = self._current
        else:
            marks.unite(self._under_way.words, self._under_way.pages, self._current.words, self._current.pages)
        self._current = fresh

    def changed(self, start: int, stop: int) -> Rows:
        """The row numbers in start..stop that the current save must write, ascending."""
        start, stop = max(start, 0), min(stop, self._max_rows)
        if start >= stop:
            return np.empty(0, np.int64)
        arrays = self._under_way.words, self._under_way.pages, start, stop
        rows = np.empty(marks.count(*arrays), np.int64)
        marks.collect(*arrays, rows)
        return rows

    @property
    def num_bytes(self) -> int:
        """Bytes in use, without the rounding to whole huge pages."""
        return self._current.num_bytes + self._under_way.num_bytes + super().num_bytes


class PackedTracking(GoneKeys):
    """The contract of Tracking without `changed`: rows of a packed map move, and the map moves their marks with them.

    `PackedMap.slices` yields the rows that the current save must write.
    """

    def __init__(self, index: PackedMap) -> None:
        super().__init__()
        self._index = index

    def mark(self, rows: Rows) -> None:
        """Mark these rows as changed. Numbers may repeat; negative ones are ignored."""
        self._index.mark(rows)

    def begin(self, is_committed: bool) -> None:
        """Begin a save, see Tracking.begin. Takes a pass over the marks of all rows."""
        self._index.begin_save(keeps_last=not is_committed)
        super().begin(is_committed)
