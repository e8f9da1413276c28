"""Rows by key, `[key | value | optimizer state | statistics]` in one store of words: find, create, drop, iterate.

Rows outside of the store have two forms. Stored: values in the words of the table's type, and state. Wide: values and
state in float32, as rules and requests see them. In a table of float32 the two are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import random, rows
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.kernels.statistics import NEVER
from torchfleet.ps.tables.policies.admission import Admission
from torchfleet.ps.tables.policies.capacity import Capacity, row_limit
from torchfleet.ps.tables.policies.decisions import Decisions, Noted
from torchfleet.ps.tables.rows.codecs import stored_codec
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.keyrange import KeyRange
from torchfleet.ps.tables.rows.narrow_rows import NarrowRows
from torchfleet.ps.tables.rows.packed_map import PackedMap
from torchfleet.ps.tables.rows.row_statistics import Columns, Statistics, join_columns, row_columns
from torchfleet.ps.tables.rows.tracking import AnyTracking, PackedTracking, Tracking
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.spec import Floats, TableSpec
from torchfleet.ps.tables.settings.table_size import HOW_TO_SET
from torchfleet.ps.tables.table import Table
from torchfleet.ps.tables.update_bounds import UpdateBounds, check_block, check_squares

# a row of at most this many bytes (key, value, state) is stored inside its map; wider ones in a store
PACKED_BYTES = 48
CHUNK = 2048  # keys per kernel call, so that their rows stay in the cache from `find` to the next kernel
_KINDS = {
    "constant": random.CONSTANT,
    "uniform": random.UNIFORM,
    "normal": random.NORMAL,
    "truncated_normal": random.TRUNCATED_NORMAL,
}


class RowStore(Table):
    """Any number of rows. Owned by one thread. A method that raises TableError has changed nothing."""

    tells_changes = True

    def __init__(self, spec: TableSpec, max_bytes: int, clock: Clock | None = None) -> None:
        super().__init__(spec)
        self.num_evicted = 0
        self.clock = clock or Clock()
        num_words, names = spec.stored_words, row_columns(spec)
        self.index = self._make_index(num_words, len(names), max_bytes)
        self._layout = (self.index.width, self.index.offset)
        self._row_words, self._value_words = num_words, num_words - (spec.num_words - spec.dim)
        self._stream = value_stream(spec.seed, spec.name)
        codec = stored_codec(spec.format, spec.dim)
        self.narrow = None if codec is None else NarrowRows(codec, spec.num_words - spec.dim, self._stream)
        self._found: Rows = np.empty(CHUNK, np.int64)
        first = self.index.offset + num_words
        self.statistics = Statistics(names, self.index, first, spec.entry) if names else None
        self.decisions = Decisions()
        self.admission = None if spec.entry.is_open else Admission(spec, max_bytes, self.clock, self.decisions)
        limit = row_limit(spec, spec.shrink, self.index)
        self._capacity = Capacity(self, limit) if limit is not None else None
        self.is_open = self.admission is None and self._capacity is None  # every key gets a row while there is memory
        self.tracking: AnyTracking | None = None
        self._keeps_numbers = not isinstance(self.index, PackedMap)  # a row has the same number as long as it exists
        self.bounds = UpdateBounds(spec)
        self.num_waiting = 0  # keys that may get a row when a sync step ends

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
        return is_there, self._widened(stored[is_there] if num_missing else stored)

    def present_at(self, at: Rows) -> tuple[Keys, Floats]:
        """As Table.present_at. A block of rows stays in the cache until its keys and values are copied."""
        keys, stored = np.empty(len(at), np.uint64), np.empty((len(at), self._value_words), np.float32)
        num = 0
        for start in range(0, len(at), CHUNK):
            some, used = self.index.alive(at[start : start + CHUNK])
            keys[num : num + len(some)] = some
            rows.gather(self.index.store, *self._layout, used, stored[num : num + len(some)])
            num += len(some)
        return keys[:num], self._widened(stored[:num])

    def absent(self, keys: Keys) -> Keys:
        """Those of `keys` that have no row."""
        chunks = [keys[start : start + CHUNK] for start in range(0, len(keys), CHUNK)]
        return np.concatenate([chunk[self._locate(chunk, False, 0) < 0] for chunk in chunks] or [keys])

    def check_keys(self, keys: Keys, create: bool = False) -> None:
        """Raise TableError if these keys cannot be looked up, or (create) if there is no room for the new ones."""
        if isinstance(self.index, KeyRange):  # every id has its row
            self.index.check(keys)
        elif create and (not self.is_open or len(keys) + self.num_waiting > self.index.max_rows - self.index.num_keys):
            self._check_room(keys)

    def _check_room(self, keys: Keys) -> None:
        num_new, room = len(keys), self.num_free_rows
        if self._capacity is None:
            room -= self.num_waiting
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

    def check_assign(self, keys: Keys, values: Floats) -> None:
        """Raise TableError if `assign` could not take this."""
        self.check_values(keys, values)
        self.check_keys(keys, create=True)
        self.index.reserve_for(keys)

    def assign(self, keys: Keys, values: Floats, columns: Columns | None = None) -> None:
        """Set values, or values and state if `values` is that wide. Among equal keys the last one wins."""
        self.check_assign(keys, values)
        self.bounds.note(rows.largest(values))
        self._put(keys, self._stored(keys, values), columns)

    def _put(self, keys: Keys, stored: Floats, columns: Columns | None) -> None:
        """`assign` for rows as they are stored, after the checks."""
        is_whole = stored.shape[1] == self._row_words  # then no initial value would remain
        for start in range(0, len(keys), CHUNK):
            some = slice(start, start + CHUNK)
            at = self._locate(keys[some], True, self._row_words, initialise=not is_whole)
            rows.scatter(self.index.store, *self._layout, at, stored[some])
            if columns is not None and self.statistics is not None:
                self.statistics.write(at, {name: column[some] for name, column in columns.items()})
            self._mark(at)
            if self.watch is not None:
                self._tell_rows(keys[some], at)
        if self.admission is not None and self.admission.candidates is not None:
            self.admission.candidates.erase(keys)

    def load(self, keys: Keys, values: Floats, columns: Columns | None = None) -> None:
        """`assign` for many rows that `check_values` accepted, after `reserve`; several times as fast."""
        self.load_stored(keys, self._stored(keys, values), columns)

    def load_stored(self, keys: Keys, stored: Floats, columns: Columns | None = None) -> None:
        """`load` for rows as they are stored."""
        self.check_keys(keys)
        self.bounds.note(rows.largest(self._widened(stored)))
        whole = (
            stored if self.statistics is None else self._with_columns(stored, self._complete(columns or {}, len(keys)))
        )
        has_room = stored.shape[1] == self._row_words and len(keys) <= self.index.num_free_rows
        if has_room and self.index.load(keys, whole):
            if self.watch is not None:
                self._tell(keys)
            return
        # which rows were dropped is recorded by a later save of the chain, not this one
        capacity, self._capacity = self._capacity, None
        try:
            self.check_keys(keys, create=True)
            self.index.reserve_for(keys)
            self._put(keys, stored, self._complete(columns or {}, len(keys)))
        finally:
            self._capacity = capacity

    def _stored(self, keys: Keys, values: Floats) -> Floats:
        """Wide rows as they are stored."""
        return values if self.narrow is None else self.narrow.stored(keys, values)

    def _widened(self, stored: Floats) -> Floats:
        """The inverse of `_stored`."""
        return stored if self.narrow is None else self.narrow.widened(stored)

    def values_at(self, at: Rows) -> Floats:
        """Values of these rows; zeros for a missing row (negative)."""
        out = np.empty((len(at), self._value_words), np.float32)
        rows.gather(self.index.store, *self._layout, at, out)
        return self._widened(out)

    def _with_columns(self, values: Floats, columns: Columns) -> Floats:
        assert self.statistics is not None
        return np.concatenate([values, join_columns(self.statistics.names, columns, len(values))], axis=1)

    def _complete(self, columns: Columns, num: int) -> Columns:
        """Fill in times that were not kept when the table was saved: its rows count as seen and created now."""
        now = np.full(num, self.clock.now, np.uint32)
        return {"seen": now, "born": now, "tick": np.full(num, self.step, np.uint32), **columns}

    def check_values(self, keys: Keys, values: Floats) -> None:
        """Raise TableError if these cannot be rows of this table. Does not access the rows, so any
        thread may call it.
        """
        num_words = self.num_words if values.shape[1:] == (self.num_words,) else self.spec.dim
        check_block(self.spec, keys, values, num_words, f"values (or {self.num_words} with state)")
        if num_words > self.spec.dim:
            check_squares(self.spec, keys, values)

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

    def chunks(
        self, num_rows: int = 1 << 16, save: Literal["full", "delta"] | None = None
    ) -> Iterator[tuple[Keys, Floats, Columns]]:
        """Yield all rows in chunks: (keys, values and state side by side, statistics).

        Rows may be pulled, pushed, added and erased between two chunks: a row that exists throughout comes exactly
        once, with consistent value and state. `save`: the rows are written by this kind of save; a delta gets only the
        rows that it must write.
        """
        for keys, stored, columns in self.stored_chunks(num_rows, save):
            yield keys, self._widened(stored), columns

    def stored_chunks(
        self, num_rows: int = 1 << 16, save: Literal["full", "delta"] | None = None
    ) -> Iterator[tuple[Keys, Floats, Columns]]:
        """`chunks`, with rows as they are stored."""
        for some in self.slices(num_rows, only_changed=save == "delta" and self.tracking is not None):
            keys, at = self.index.alive(some)
            out = np.empty((len(keys), self._row_words), np.float32)
            rows.gather(self.index.store, *self._layout, at, out)
            columns: Columns = {}
            if self.statistics is not None:
                columns = self.statistics.read(at)
                if save is not None and "delta" in columns:
                    self.statistics.put("delta", at, 0)  # accumulated since the last save
                    self.decisions.note("saved", keys)
            yield keys, out, columns

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

    def walk(self, cursor: int, num_rows: int) -> tuple[Keys, Floats, int]:
        """As Table.walk: `cursor` is a row number, or what PackedMap.walk_from returned."""
        index = self.index
        if isinstance(index, PackedMap):
            keys, at, cursor = index.walk_from(cursor, num_rows)
        else:
            stop = min(cursor + num_rows, index.num_row_numbers)
            keys, at = index.alive(np.arange(min(cursor, stop), stop))
            cursor = stop if stop < index.num_row_numbers else 0
        return keys, self.values_at(at), cursor

    def settle(self) -> bool:
        """As Table.settle: continues the growth of maps."""
        candidates = self.admission.candidates if self.admission is not None else None
        return self.index.settle() or (candidates is not None and candidates.index.settle())

    def begin_save(self, is_committed: bool) -> None:
        """As Table.begin_save."""
        if self.tracking is None:
            self.tracking = self._make_tracking()
        self.tracking.begin(is_committed)
        if self.admission is not None:
            self.admission.begin_save(is_committed)

    def _make_tracking(self) -> AnyTracking:
        index = self.index
        return PackedTracking(index) if isinstance(index, PackedMap) else Tracking(index.max_rows)

    def begin_noting(self) -> None:
        """As Table.begin_noting."""
        self.decisions.begin()

    def end_noting(self) -> Noted | None:
        """As Table.end_noting."""
        noted = self.decisions.end()
        if noted is not None:
            noted.gone = self.absent(noted.dropped)
        return noted

    def follow(self, noted: Noted) -> None:
        """As Table.follow."""
        self.decisions.followed = noted
        self.num_evicted += len(noted.dropped)
        if len(noted.dropped):
            self.erase(noted.dropped)
        if self.admission is not None and self.admission.candidates is not None and len(noted.forgotten):
            self.admission.candidates.erase(noted.forgotten)
        if self.statistics is not None and len(noted.saved):
            at = self.find(noted.saved)
            self.statistics.put("delta", at[at >= 0], 0)

    def follow_no_more(self) -> None:
        """As Table.follow_no_more."""
        noted, self.decisions.followed = self.decisions.followed, None
        if noted is not None and len(noted.gone):
            self.erase(noted.gone)

    @property
    def num_rows(self) -> int:
        """Number of keys that have a row."""
        return self.index.num_keys

    @property
    def num_words(self) -> int:
        """Numbers per row: values and state."""
        return self.spec.num_words

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` new rows at once. For loading, when no request waits."""
        self.index.reserve_at_once(min(num_rows, self.index.num_free_rows))

    def _locate(self, keys: Keys, create: bool, num_words: int, initialise: bool = True) -> Rows:
        """Row numbers of `keys`, valid until the next call. `num_words` of each row are prefetched for the caller."""
        at = self._found[: len(keys)]
        if self.index.find(keys, at, num_words) and create:
            if self._capacity is not None:
                self._capacity.make_room(int((at < 0).sum()), at)
            self._insert(keys, at, initialise)
        return at

    def _insert(self, keys: Keys, at: Rows, initialise: bool) -> None:
        """Create rows for the keys whose `at` is negative."""
        if len(keys) > self.index.max_rows - self.index.num_keys and not isinstance(self.index, KeyRange):
            self._check_room(keys)
        fresh = self.index.insert_missing(keys, at)
        if initialise:
            self._initialise(keys, at, fresh)
        if self.statistics is not None:
            self.statistics.begin(at[fresh], self.clock.now, self.step)
        new_keys, new_rows = keys[fresh], at[fresh]
        self._note_new(new_keys, new_rows)
        self._mark(new_rows)
        if self.watch is not None:
            self._tell_rows(new_keys, new_rows)

    def _note_new(self, keys: Keys, at: Rows) -> None:
        """Called when these distinct keys have got rows."""

    def _initialise(self, keys: Keys, at: Rows, fresh: npt.NDArray[np.int64]) -> None:
        """Give the rows of these places among `at` their first values and state."""
        if self.narrow is None:
            self._fill(self.index.store, self._layout, keys, at, fresh)
            return
        new, first = keys[fresh], np.empty((len(fresh), self.num_words), np.float32)
        every = np.arange(len(fresh))
        self._fill(first.reshape(-1), (self.num_words, 0), new, every, every)
        rows.scatter(self.index.store, *self._layout, at[fresh], self.narrow.stored(new, first, are_first=True))

    def _fill(self, store: Floats, layout: tuple[int, int], keys: Keys, at: Rows, fresh: npt.NDArray[np.int64]) -> None:
        """Write first values and state into wide rows of a store."""
        first, rule = self.spec.initializer, self.spec.rule
        state = rule.row_rule.initial_state(rule)
        random.initialise(
            store, *layout, self.spec.dim, keys, at, fresh, self._stream,
            _KINDS[first.name], first.a, first.b, np.float32(state),
        )  # fmt: skip

    def copies(self, keys: Keys, create: bool) -> tuple[Floats, Rows]:
        """(a store with wide copies of the rows of these distinct keys, mask of the keys that have a row there).

        `create`: a key without a row has the row that it would get. Row number i belongs to the i-th key; its values
        are at the begin of its `num_words` numbers.
        """
        at, stored = self.find(keys), np.empty((len(keys), self._row_words), np.float32)
        rows.gather(self.index.store, *self._layout, at, stored)
        store = self._widened(stored).reshape(-1)
        if create:
            self._fill(store, (self.num_words, 0), keys, np.arange(len(keys)), np.flatnonzero(at < 0))
        return store, np.flatnonzero((at >= 0) | create)

    def mark_all(self) -> None:
        """Mark all rows as changed."""
        for some in self.slices(1 << 16):
            self._mark(self.index.alive(some)[1])

    def _mark(self, at: Rows) -> None:
        if self.tracking is not None:
            self.tracking.mark(at)

    def _tell_rows(self, keys: Keys, at: Rows) -> None:
        """As `_tell`, of keys that have these rows."""
        self._tell(keys, at if self._keeps_numbers else None)


def value_stream(seed: int, name: str) -> np.uint64:
    """The part of a row's initial value that depends on (seed, table). Uses the name, not the order of creation."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    stream: np.uint64 = np.uint64(int.from_bytes(digest, "little"))
    return stream
