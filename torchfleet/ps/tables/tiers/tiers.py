"""Where the rows of a table on two tiers are: those used last in memory, all others on disk.

Before a request touches rows, `bring` reads those that are on disk, all at once, and `_make_room` writes as many of the
least recently used rows. A row is in one place only, so it is written each time it leaves memory: training changes
nearly all rows that it reads.
"""

from __future__ import annotations

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.kernels.statistics import NEVER
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.tiers.all_rows import AllRows
from torchfleet.ps.tables.tiers.cold_rows import ColdRows
from torchfleet.ps.tables.tiers.cold_search import look_up
from torchfleet.ps.tables.tiers.compaction import Compaction
from torchfleet.ps.tables.tiers.directory import Directory, Places
from torchfleet.ps.tables.tiers.found_rows import FoundRows
from torchfleet.ps.tables.tiers.hot_rows import SWEEP, HotRows
from torchfleet.ps.tables.tiers.pages import RECORD_HEAD, Words, records_of
from torchfleet.ps.tables.tiers.passes import Passes

HOT_BYTES = 18 + 12  # per row in memory, beside the row: map slots, the list of free rows; used, changed, bits
BUFFER_BYTES = 32 << 20  # blocks on their way to the disk, and what is read at once
FEWEST_ROWS = 4096  # that memory must have room for


class Tiers:
    """The tiers of one table; `index` has the rows in memory."""

    def __init__(self, name: str, index: KeyMap, memory: int, cold: ColdRows) -> None:
        self._name, self._index, self._memory = name, index, memory
        self.cold = cold
        self.directory = Directory(memory // 9, index.max_rows)
        self.hot = HotRows(index)
        self._found = FoundRows(index, self.hot.used)
        self._passes = Passes(index.max_rows, Memory(4 * index.max_rows).array(np.uint32))
        self.compaction = Compaction(cold, self.directory, self._passes)
        self.all_rows = AllRows(name, self.hot, cold, self.directory, self._passes)
        self.interval = 1  # the number of the present interval between two saves: rows that change now get it
        self.num_read = self.num_written = 0  # rows

    @property
    def max_hot(self) -> int:
        """How many rows may be in memory, beside the directory of all rows."""
        free = self._memory - self.directory.num_bytes - BUFFER_BYTES
        return min(free // (4 * self._index.width + HOT_BYTES), self._index.max_rows)

    @property
    def num_bytes(self) -> int:
        """Memory in use, except buffers."""
        return self._index.num_bytes + self.directory.num_bytes + 12 * self._index.num_row_numbers

    def check_batch(self, keys: Keys) -> None:
        """Raise TableError if the rows of these keys do not fit in memory together, or the disk has no room for those
        that leave memory for them.
        """
        num, most = len(keys), self.max_hot
        if num > most and (num := len(unique(keys)[0])) > most:
            raise TableError(
                f"table '{self._name}': one request needs {num:,} rows, and memory holds {most:,} of its "
                f"{self.directory.num_keys:,} rows beside their directory. Give it more memory, or smaller batches."
            )
        self.cold.reserve(num + SWEEP)

    def check_new(self, keys: Keys) -> None:
        """Raise TableError if the directory has no room for those of these keys that have no row."""
        free = self.directory.max_keys - self.directory.num_keys
        if len(keys) <= free:
            return
        strangers = unique(keys[self.hot.find(keys, 0) < 0], many_repeat=False)[0]
        num = int((look_up(self.directory, self.cold, strangers)[0] < 0).sum()) if len(strangers) > free else 0
        if num > free:
            raise TableError(
                f"table '{self._name}' has {self.directory.num_keys:,} rows, one request needs {num:,} more, and its "
                f"memory of {self._memory:,} bytes holds a directory of {self.directory.max_keys:,}. Give it more "
                "memory, use more servers, or drop rows (fleet.shrink)."
            )

    def foresee(self, keys: Keys) -> None:
        """Begin to read the rows of these keys, which a request that waits will need, from the disk."""
        at = self.hot.find(keys, 0)
        self._found.note(keys, at)
        missing = keys[at < 0]
        places = self.directory.find_cold(missing, np.zeros(len(missing), np.int64))
        self.cold.foresee(places[places >= 0] - self.directory.first_cold)

    def bring(self, keys: Keys, num_words: int = 0) -> Rows:
        """Bring the rows of these keys into memory, and make room for those that have none yet. Returns the row
        numbers; -1 for a key without a row.
        """
        if self.hot.begin_request():
            self._found.forget()
        self.compaction.compact_if_needed()
        at = self._found.rows_of(keys, self.hot.tick, num_words)
        if at is not None and at.min() >= 0:
            return at
        at = self.hot.rows_used(keys, at, num_words)
        missing = at < 0
        if missing.any():
            strangers, inverse = unique(keys[missing], many_repeat=False)
            places, records = look_up(self.directory, self.cold, strangers)
            here = places >= 0
            self._make_room(len(strangers))
            brought = np.full(len(strangers), -1, np.int64)
            brought[here] = self._insert(strangers[here], places[here], records)
            at[missing] = brought[inverse]
        self._found.note(keys, at, self.hot.tick)
        return at

    def _insert(self, keys: Keys, places: Places, records: Words) -> Rows:
        """Move records into memory, where there is room for them. Returns their row numbers."""
        if not len(keys):
            return np.empty(0, np.int64)
        at = self.hot.insert(keys, records[:, RECORD_HEAD:])
        slots = places - self.directory.first_cold
        self._passes.brought(keys, at, self.cold.ordinals(slots), records[:, KEY_WORDS + 1])
        self.hot.changed[at] = records[:, KEY_WORDS]
        self.directory.move(keys, places, at)
        self.cold.release(slots)
        self.num_read += len(keys)
        return at

    def note_new(self, keys: Keys, at: Rows) -> None:
        """Note that these keys got rows in memory."""
        self.directory.insert(keys, at)
        self._passes.forget(at)
        self.hot.use(at)
        self.hot.changed[at] = 0

    def note_gone(self, keys: Keys, at: Rows) -> None:
        """Note that the rows of these keys in memory are dropped."""
        self.directory.remove(keys, at)
        self.hot.used[at] = NEVER
        self._found.forget()

    def add_cold(self, keys: Keys, words: Words) -> None:
        """Append new rows straight to the disk: for loading more rows than memory holds."""
        self.cold.reserve(len(keys))
        records = records_of(keys, words, np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint32))
        self.directory.insert(keys, self.cold.append(records, 0) + self.directory.first_cold)

    def mark(self, at: Rows) -> None:
        """Note that these rows have changed; negative numbers are ignored."""
        self.hot.changed[at[at >= 0]] = self.interval

    def look_up(self, keys: Keys) -> tuple[Places, Words]:
        """As cold_search.look_up."""
        return look_up(self.directory, self.cold, keys)

    # Rows that leave memory

    def _make_room(self, num_new: int) -> None:
        """Write rows that this request does not use to the disk, until `num_new` new rows and some more fit."""
        excess = self._index.num_keys + num_new - self.max_hot
        if excess <= 0:
            return
        wanted, num_out = min(excess + SWEEP, self._index.num_keys), 0
        self.cold.reserve(wanted)
        for at, tick in self.hot.leaving(wanted):
            self._found.note_left(tick)
            self._write_out(at)
            num_out += len(at)
        if num_out < excess:
            raise RuntimeError("a request needs more rows than memory holds. This is a bug.")

    def _write_out(self, at: Rows) -> None:
        keys = self._index.keys_of(at)
        changed = self.hot.changed[at]
        records = records_of(keys, self.hot.gather(at), changed, self._passes.bits_of(at))
        slots = self.cold.append(records, int(changed.max()))
        self.directory.move(keys, at, slots + self.directory.first_cold)
        self._index.erase(keys)
        self.hot.used[at] = NEVER
        self.num_written += len(at)
