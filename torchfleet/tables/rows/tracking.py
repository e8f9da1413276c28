"""Which rows of a table changed, and which keys lost theirs, since the last save: what a delta writes.

There are two generations. A save writes one of them, while whatever changes meanwhile belongs to the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.kernels import marks
from torchfleet.kernels.marks import PAGE_ROWS, PAGE_WORDS
from torchfleet.kernels.merge import unique
from torchfleet.tables.rows.keymap import Keys, Rows
from torchfleet.tables.rows.memory import Memory

_COMPACT_AT = 1 << 16  # keys


class _Generation:
    """The changes between two saves. Its address space is that of all rows, its memory that of rows marked."""

    def __init__(self, max_rows: int) -> None:
        num_pages = -(-max_rows // PAGE_ROWS)
        self.words: npt.NDArray[np.uint64] = Memory(8 * PAGE_WORDS * num_pages).array(np.uint64)
        self.pages: npt.NDArray[np.uint8] = np.zeros(num_pages, np.uint8)
        self.gone: list[Keys] = [np.empty(0, np.uint64)]
        self.num_gone = 0
        self.is_distinct = True  # gone is one array without repeats
        self.compact_at = _COMPACT_AT

    def note_gone(self, keys: Keys) -> None:
        self.gone.append(keys)
        self.num_gone += len(keys)
        self.is_distinct = False
        if self.num_gone > self.compact_at:
            self.distinct_gone()
            self.compact_at = max(_COMPACT_AT, 2 * self.num_gone)

    def distinct_gone(self) -> Keys:
        if not self.is_distinct:
            self.gone = [unique(np.concatenate(self.gone))[0].copy()]  # not a view of memory for all
            self.num_gone = len(self.gone[0])
            self.is_distinct = True
        return self.gone[0]

    @property
    def num_bytes(self) -> int:
        return 8 * PAGE_WORDS * int(np.count_nonzero(self.pages)) + len(self.pages) + 8 * self.num_gone


class Tracking:
    """For rows with numbers below `max_rows`. Saves begin one after another, and each says how the last one ended."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._current = _Generation(max_rows)
        self._under_way = _Generation(max_rows)

    def mark(self, rows: Rows) -> None:
        """These rows changed now. Numbers may repeat; negative ones are passed over."""
        num_beyond = marks.mark(self._current.words, self._current.pages, self._max_rows, rows)
        if num_beyond:
            raise IndexError(f"{num_beyond} of {len(rows)} row numbers are {self._max_rows:,} or more. This is a bug.")

    def note_gone(self, keys: Keys) -> None:
        """These keys lost their rows now. They are copied."""
        if len(keys):
            self._current.note_gone(keys.copy())

    def begin(self, is_committed: bool) -> None:
        """A save begins: it must write what changed since the one before it began.

        `is_committed`: the one before is on disk for good, and what it held is forgotten. Otherwise this one must write
        that as well, which takes a pass over the rows that changed.
        """
        fresh = _Generation(self._max_rows)
        if is_committed:
            self._under_way = self._current
        else:
            marks.unite(self._under_way.words, self._under_way.pages, self._current.words, self._current.pages)
            self._under_way.note_gone(self._current.distinct_gone())
        self._current = fresh

    def changed(self, start: int, stop: int) -> Rows:
        """The row numbers from `start` on and below `stop` that the save under way must write, ascending."""
        start, stop = max(start, 0), min(stop, self._max_rows)
        if start >= stop:
            return np.empty(0, np.int64)
        arrays = self._under_way.words, self._under_way.pages, start, stop
        rows = np.empty(marks.count(*arrays), np.int64)
        marks.collect(*arrays, rows)
        return rows

    @property
    def gone(self) -> Keys:
        """Distinct keys that the save under way must write as gone, in the order in which they went.

        A key that has come back is among them too: whoever writes them leaves it out.
        """
        return self._under_way.distinct_gone()

    @property
    def num_bytes(self) -> int:
        """Bytes in use, but for the rounding to whole huge pages."""
        return self._current.num_bytes + self._under_way.num_bytes
