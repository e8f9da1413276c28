"""The rows of a table on two tiers that are in memory: when each was used last, and which of them leave next.

A request is a tick. A hand sweeps the rows and takes those whose last tick is among the oldest tenth, so that requests
keep no ordered list.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import rows as row_kernels
from torchfleet.ps.kernels.statistics import NEVER, oldest
from torchfleet.ps.tables.policies.capacity import SAMPLE, old_tick
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.tiers.pages import Words

CHUNK = 2048  # keys per call of the map
SWEEP = 8192  # rows that leave memory at once
MAX_TICK = 1 << 31


class HotRows:
    """The rows of a map, and two numbers for each: the tick of its last use, and the interval of its last change."""

    def __init__(self, index: KeyMap) -> None:
        self.index, self.tick = index, 1
        self.used: npt.NDArray[np.uint32] = Memory(4 * index.max_rows).array(np.uint32)  # NEVER: not in use
        self.changed: npt.NDArray[np.uint32] = Memory(4 * index.max_rows).array(np.uint32)
        self._hand = self._cut = 0

    def begin_request(self) -> bool:
        """Begin a tick. Returns whether all ticks were renumbered, lower by half of their range, so that they do not
        overflow.
        """
        self.tick += 1
        if self.tick < MAX_TICK:
            return False
        used = self.used[: self.index.num_row_numbers]
        is_used = used != NEVER
        used[is_used] = np.maximum(used[is_used], MAX_TICK // 2) - (MAX_TICK // 2 - 1)
        self.tick -= MAX_TICK // 2 - 1
        self._hand = 0
        return True

    def find(self, keys: Keys, num_words: int) -> Rows:
        """Row numbers of these keys, -1 for one that has no row in memory. `num_words` of each row are prefetched."""
        at = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), CHUNK):
            self.index.find(keys[start : start + CHUNK], at[start : start + CHUNK], num_words)
        return at

    def use(self, at: Rows) -> None:
        """The present request uses these rows; negative numbers are ignored."""
        self.used[at[at >= 0]] = self.tick

    def rows_used(self, keys: Keys, known: Rows | None, num_words: int) -> Rows:
        """Row numbers of these keys, -1 for a key without a row in memory. Marks the rows that it finds as used by the
        present request. `known`: row numbers that need no search, and -1 for the other keys.
        """
        at = np.full(len(keys), -1, np.int64) if known is None else known
        missing = np.flatnonzero(at < 0)
        at[missing] = found = self.find(keys[missing], num_words)
        self.use(found)
        return at

    def insert(self, keys: Keys, words: Words) -> Rows:
        """Make rows of these distinct keys, for which there is room. Returns their numbers."""
        at = np.full(len(keys), -1, np.int64)
        for start in range(0, len(keys), CHUNK):
            self.index.insert_missing(keys[start : start + CHUNK], at[start : start + CHUNK])
        values = np.ascontiguousarray(words).view(np.float32)
        row_kernels.scatter(self.index.store, self.index.width, self.index.offset, at, values)
        self.use(at)
        return at

    def gather(self, at: Rows) -> Words:
        """The words of these rows, without their keys."""
        words = np.empty((len(at), self.index.width - KEY_WORDS), np.float32)
        row_kernels.gather(self.index.store, self.index.width, self.index.offset, at, words)
        return words.view(np.uint32)

    def leaving(self, num: int) -> Iterator[tuple[Rows, int]]:
        """Yield (rows, the latest tick at which one of them may have been used): `num` of the least recently used rows
        in all, fewer if only rows of the present request are left. The caller removes these rows before it takes the
        next ones.
        """
        num_out, num_empty = 0, 0
        while num_out < num:
            if self._hand == 0:
                self._cut = self.tick - 1 if num_empty else self._old_tick()
                num_empty += 1
            num_rows = self.index.num_row_numbers
            found = np.empty(min(num - num_out, SWEEP), np.int64)
            cut = min(self._cut, self.tick - 1)
            num_found, stop = oldest(self.used, 1, 0, self._hand, num_rows, np.uint32(cut), len(found), found)
            self._hand = stop if stop < num_rows else 0
            if num_found:
                num_out, num_empty = num_out + num_found, 0
                yield found[:num_found], cut
            elif num_empty > 2:
                return

    def _old_tick(self) -> int:
        num = self.index.num_row_numbers
        return old_tick(self.used[: num : max(1, num // SAMPLE)])
