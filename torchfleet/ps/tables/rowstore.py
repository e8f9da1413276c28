"""Rows by key, `[key | value | optimizer state | statistics]` in one store of words: find, create, drop, iterate.

Outside of the store rows are `stored` or `wide`: rows/row_form.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import rows
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.kernels.statistics import NEVER
from torchfleet.ps.tables.policies.admission import Admission
from torchfleet.ps.tables.policies.capacity import Capacity, row_limit
from torchfleet.ps.tables.policies.decisions import Decisions
from torchfleet.ps.tables.policies.new_keys import WaitingKeys
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.keyrange import KeyRange
from torchfleet.ps.tables.rows.packed_map import PackedMap
from torchfleet.ps.tables.rows.row_form import RowForm
from torchfleet.ps.tables.rows.row_statistics import Columns, Statistics, row_columns
from torchfleet.ps.tables.rows.tracking import AnyTracking, Tracking
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.spec import Floats, TableSpec
from torchfleet.ps.tables.settings.table_size import HOW_TO_SET
from torchfleet.ps.tables.table import Table
from torchfleet.ps.tables.update_bounds import UpdateBounds

# a row of at most this many bytes (key, value, state) is stored inside its map; wider ones in a store
PACKED_BYTES = 48
CHUNK = 2048  # keys per kernel call, so that their rows stay in the cache from `find` to the next kernel


class RowStore(Table):
    """Any number of rows. Owned by one thread. A method that raises TableError has changed nothing."""

    tells_changes = True

    def __init__(self, spec: TableSpec, max_bytes: int, clock: Clock | None = None) -> None:
        super().__init__(spec)
        self.num_evicted = 0
        self.clock = clock or Clock()
        self.form, names = RowForm(spec), row_columns(spec)
        self._row_words, self._value_words = self.form.row_words, self.form.value_words
        self.index = self._make_index(self._row_words, len(names), max_bytes)
        self._layout = (self.index.width, self.index.offset)
        self._found: Rows = np.empty(CHUNK, np.int64)
        first = self.index.offset + self._row_words
        self.statistics = Statistics(names, self.index, first, spec.entry) if names else None
        self.decisions = Decisions()
        self.admission = None if spec.entry.is_open else Admission(spec, max_bytes, self.clock, self.decisions)
        limit = row_limit(spec, spec.shrink, self.index)
        self._capacity = Capacity(self, limit) if limit is not None else None
        self.is_open = self.admission is None and self._capacity is None  # every key gets a row while there is memory
        self.tracking: AnyTracking | None = None
        self._keeps_numbers = not isinstance(self.index, PackedMap)  # a row has the same number as long as it exists
        self.bounds = UpdateBounds(spec)
        self.waiting = WaitingKeys()

    def _make_index(self, num_words: int, num_columns: int, max_bytes: int) -> KeyMap | KeyRange | PackedMap:
        spec = self.spec
        if spec.has_size:
            return KeyRange(spec.name, num_words, max_bytes, spec.size, spec.shard, spec.num_shards)
        if not num_columns and spec.entry.is_open and 4 * (KEY_WORDS + num_words) <= PACKED_BYTES:
            return PackedMap(num_words, max_bytes)
        # policies need row numbers that do not change while rows come and go
        return KeyMap(num_words + num_columns, max_bytes)

    def find(self, keys: Keys) -> Rows:
        """Row numbers of any number of keys, in a new array; -1 for a key without a row."""
        at = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), CHUNK):
            self.index.find(keys[start : start + CHUNK], at[start : start + CHUNK], self._value_words)
        return at

    def present(self, keys: Keys) -> tuple[npt.NDArray[np.bool_], Floats]:
        """As Table.present."""
        at, stored = np.empty(len(keys), np.int64), np.empty((len(keys), self._value_words), np.float32)
        if isinstance(self.index, KeyMap):
            num_missing = self.index.read(keys, at, stored)
        else:
            at = self.find(keys)
            rows.gather(self.index.store, *self._layout, at, stored)
            num_missing = int((at < 0).sum())
        is_there = at >= 0
        return is_there, self.form.widened(stored[is_there] if num_missing else stored)

    def present_at(self, at: Rows) -> tuple[Keys, Floats]:
        """As Table.present_at. A block of rows stays in the cache until its keys and values are copied."""
        keys, stored = np.empty(len(at), np.uint64), np.empty((len(at), self._value_words), np.float32)
        num = 0
        for start in range(0, len(at), CHUNK):
            some, used = self.index.alive(at[start : start + CHUNK])
            keys[num : num + len(some)] = some
            rows.gather(self.index.store, *self._layout, used, stored[num : num + len(some)])
            num += len(some)
        return keys[:num], self.form.widened(stored[:num])

    def absent(self, keys: Keys) -> Keys:
        """Those of `keys` that have no row."""
        chunks = [keys[start : start + CHUNK] for start in range(0, len(keys), CHUNK)]
        return np.concatenate([chunk[self._locate(chunk, False, 0) < 0] for chunk in chunks] or [keys])

    def check_keys(self, keys: Keys, create: bool = False) -> None:
        """Raise TableError if these keys cannot be looked up, or (create) if there is no room for the new ones."""
        if isinstance(self.index, KeyRange):  # every id has its row
            self.index.check(keys)
        elif create and (not self.is_open or len(keys) + self.waiting.num > self.index.max_rows - self.index.num_keys):
            self._check_room(keys)

    def _check_room(self, keys: Keys) -> None:
        num_new, room = len(keys), self.num_free_rows
        if self._capacity is None:
            room -= self.waiting.num
        if num_new > min(room, num_new if self.admission is None else self.admission.num_free):
            num_new = len(np.unique(self.absent(keys)))
        if num_new > room:
            raise TableError(
                f"table '{self.spec.name}' is full: {self.index.num_keys:,} rows, {num_new:,} new keys, room for "
                f"{room:,} rows. Set a larger max_table_bytes ({HOW_TO_SET}), use more servers, or evict "
                "(fleet.shrink)."
            )
        if self.admission is not None:
            self.admission.check_room(num_new)
        elif self._capacity is not None and len(keys) > self._capacity.max_rows:
            self._capacity.check(len(unique(keys)[0]))

    @property
    def num_free_rows(self) -> int:
        """How many more keys can get a row. A table with a capacity evicts rows to make room."""
        return self.index.num_free_rows if self._capacity is None else self._capacity.max_rows

    def values_at(self, at: Rows) -> Floats:
        """Values of these rows; zeros for a missing row (negative)."""
        out = np.empty((len(at), self._value_words), np.float32)
        rows.gather(self.index.store, *self._layout, at, out)
        return self.form.widened(out)

    def erase(self, keys: Keys) -> int:
        """Drop rows and reuse their memory. Absent keys are ignored. Returns how many rows were dropped."""
        self.check_keys(keys)
        if self.statistics is None and self.tracking is None:
            num = self.index.erase(keys)
            self.num_dropped += num
            if self.watch is not None:
                self._tell(keys)
            return num
        at = self.find(keys)
        return self.drop(keys[at >= 0], at[at >= 0])

    def drop(self, keys: Keys, at: Rows) -> int:
        """`erase` for keys that are known to be in these rows."""
        if self.statistics is not None:
            self.statistics.put("tick", at, NEVER)
        if self.tracking is not None and len(keys):
            self.tracking.note_gone(keys)
        self.num_dropped += len(keys)
        if self.watch is not None:
            self._tell(keys)
        return self.index.erase(keys)

    def slices(self, num_rows: int, only_changed: bool = False) -> Iterator[Rows]:
        """Yield the numbers of all rows in slices, as `chunks` uses them; `index.alive` tells which are in use.

        They are valid until rows are added or erased. `only_changed`: only rows that the current save must write.
        """
        if isinstance(self.index, PackedMap):
            yield from self.index.slices(num_rows, only_changed)
            return
        start, tracking = 0, self.tracking if only_changed else None
        while start < self.index.num_row_numbers:
            stop = min(start + num_rows, self.index.num_row_numbers)
            yield tracking.changed(start, stop) if isinstance(tracking, Tracking) else np.arange(start, stop)
            start = stop

    def judged(self, num_rows: int, with_values: bool) -> Iterator[tuple[Keys, Columns, Floats | None]]:
        """Yield what a shrink decides by, of all rows in slices: (keys, statistics, values or None). Rows may be
        dropped between two slices."""
        for some in self.slices(num_rows):
            keys, at = self.index.alive(some)
            columns = {} if self.statistics is None else self.statistics.read(at)
            yield keys, columns, self.values_at(at) if with_values else None

    def walk(self, cursor: int, num_rows: int) -> tuple[Keys, Floats, int]:
        """As Table.walk: `cursor` is a row number, or what PackedMap.walk_from returned."""
        keys, at, cursor = self._walk(cursor, num_rows)
        return keys, self.values_at(at), cursor

    def walk_rows(self, cursor: int, num_rows: int) -> tuple[Keys, Floats, int]:
        """As Table.walk_rows."""
        keys, at, cursor = self._walk(cursor, num_rows)
        stored = np.empty((len(at), self._row_words), np.float32)
        rows.gather(self.index.store, *self._layout, at, stored)
        return keys, self.form.widened(stored), cursor

    def _walk(self, cursor: int, num_rows: int) -> tuple[Keys, Rows, int]:
        index = self.index
        if isinstance(index, PackedMap):
            keys, at, cursor = index.walk_from(cursor, num_rows)
        else:
            stop = min(cursor + num_rows, index.num_row_numbers)
            keys, at = index.alive(np.arange(min(cursor, stop), stop))
            cursor = stop if stop < index.num_row_numbers else 0
        return keys, at, cursor

    def settle(self) -> bool:
        """As Table.settle: continues the growth of maps."""
        candidates = self.admission.candidates if self.admission is not None else None
        return self.index.settle() or (candidates is not None and candidates.index.settle())

    @property
    def num_rows(self) -> int:
        """Number of keys that have a row."""
        return self.index.num_keys

    @property
    def num_words(self) -> int:
        """Numbers per row: values and state."""
        return self.spec.num_words

    def _locate(self, keys: Keys, create: bool, num_words: int, initialise: bool = True) -> Rows:
        """Row numbers of `keys`, valid until the next call. `num_words` of each row are prefetched for the caller."""
        at = self._found[: len(keys)]
        if self.index.find(keys, at, num_words) and create:
            if self._capacity is not None:
                missing = keys[at < 0]  # keys may repeat, and get one row each
                num_new = len(missing) if self._capacity.has_room(len(missing)) else len(unique(missing)[0])
                self._capacity.make_room(num_new, at)
            self._insert(keys, at, initialise)
        return at

    def _insert(self, keys: Keys, at: Rows, initialise: bool) -> None:
        """Create rows for the keys whose `at` is negative."""
        if len(keys) > self.index.max_rows - self.index.num_keys and not isinstance(self.index, KeyRange):
            self._check_room(keys)
        fresh = self.index.insert_missing(keys, at)
        if initialise:
            self.form.begin(self.index.store, self._layout, keys, at, fresh)
        if self.statistics is not None:
            self.statistics.begin(at[fresh], self.clock.now, self.step)
        new_keys, new_rows = keys[fresh], at[fresh]
        self._note_new(new_keys, new_rows)
        self._mark(new_rows)
        if self.watch is not None:
            self._tell_rows(new_keys, new_rows)

    def _note_new(self, keys: Keys, at: Rows) -> None:
        """Called when these distinct keys have got rows."""

    def copies(self, keys: Keys, create: bool) -> tuple[Floats, Rows]:
        """(wide copies of the rows of these distinct keys, numbers of the copies of keys that have a row).

        `create`: the copy of a key without a row is the row that it would get, and counts as a row; otherwise zeros.
        """
        at, stored = self.find(keys), np.empty((len(keys), self._row_words), np.float32)
        rows.gather(self.index.store, *self._layout, at, stored)
        wide = self.form.widened(stored)
        if create:
            missing = np.flatnonzero(at < 0)
            self.form.begin_wide(wide.reshape(-1), (self.num_words, 0), keys, np.arange(len(keys)), missing)
        return wide, np.flatnonzero((at >= 0) | create)

    def _mark(self, at: Rows) -> None:
        if self.tracking is not None:
            self.tracking.mark(at)

    def _tell_rows(self, keys: Keys, at: Rows) -> None:
        """As `_tell`, of keys that have these rows."""
        self._tell(keys, at if self._keeps_numbers else None)
