"""The life of a table's rows: they are assigned, loaded, created for keys that appear, dropped and saved. The table
decides this itself or follows the decisions of another server. Pulls and pushes are in sparse_table.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import rows
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.tables import eviction
from torchfleet.ps.tables.policies.decisions import Noted
from torchfleet.ps.tables.policies.new_keys import admitted
from torchfleet.ps.tables.rows.keymap import Keys, Rows
from torchfleet.ps.tables.rows.packed_map import PackedMap
from torchfleet.ps.tables.rows.row_statistics import Columns, join_columns
from torchfleet.ps.tables.rows.tracking import AnyTracking, PackedTracking, Tracking
from torchfleet.ps.tables.rowstore import CHUNK, RowStore
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Floats
from torchfleet.ps.tables.update_bounds import check_block, check_squares


class KeyedTable(RowStore):
    """A row store with the commands that decide which keys have rows."""

    # Rows that are set

    def check_values(self, keys: Keys, values: Floats) -> None:
        """Raise TableError if these cannot be rows of this table. Does not access the rows, so any
        thread may call it.
        """
        num_words = self.num_words if values.shape[1:] == (self.num_words,) else self.spec.dim
        check_block(self.spec, keys, values, num_words, f"values (or {self.num_words} with state)")
        if num_words > self.spec.dim:
            check_squares(self.spec, keys, values)

    def check_assign(self, keys: Keys, values: Floats) -> None:
        """Raise TableError if `assign` cannot apply this."""
        self.check_values(keys, values)
        self.check_keys(keys, create=True)
        self.index.reserve_for(keys)

    def assign(self, keys: Keys, values: Floats, columns: Columns | None = None) -> None:
        """Set values, or values and state if `values` is that wide. Among equal keys the last one wins."""
        self.check_assign(keys, values)
        self.bounds.note(rows.largest(values))
        self._put(keys, self.form.stored(keys, values), columns)

    def _put(self, keys: Keys, stored: Floats, columns: Columns | None) -> None:
        """`assign` for rows as they are stored, after the checks."""
        is_whole = stored.shape[1] == self._row_words  # overwrites whole rows: they need no initial values
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

    def check_assign_state(self, keys: Keys, states: Floats) -> None:
        """As Table.check_assign_state."""
        num = self.num_words - self.spec.dim
        if not num or states.shape != (len(keys), num):
            raise TableError(
                f"table '{self.spec.name}' expects {num} numbers of state for each of {len(keys):,} rows, found "
                f"{states.shape}"
            )
        self.check_values(keys, np.concatenate([np.zeros((len(keys), self.spec.dim), np.float32), states], axis=1))
        self.check_keys(keys)

    def assign_state(self, keys: Keys, states: Floats) -> None:
        """As Table.assign_state."""
        self.bounds.note(rows.largest(states))
        for start in range(0, len(keys), CHUNK):
            self._put_state(keys[start : start + CHUNK], states[start : start + CHUNK])

    def _put_state(self, keys: Keys, states: Floats) -> None:
        """`assign_state` for at most CHUNK rows in memory."""
        at = self.find(keys)
        there = at >= 0
        keys, at = keys[there], at[there]
        stored = np.empty((len(keys), self._row_words), np.float32)
        rows.gather(self.index.store, *self._layout, at, stored)
        stored[:, self._value_words :] = states[there]
        rows.scatter(self.index.store, *self._layout, at, stored)
        self._mark(at)
        if self.watch is not None:
            self._tell_rows(keys, at)

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` new rows at once. For loading, when no request waits."""
        self.index.reserve_at_once(min(num_rows, self.index.num_free_rows))

    def load(self, keys: Keys, values: Floats, columns: Columns | None = None) -> None:
        """`assign` for many rows that `check_values` accepted, after `reserve`; several times as fast."""
        self.load_stored(keys, self.form.stored(keys, values), columns)

    def load_stored(self, keys: Keys, stored: Floats, columns: Columns | None = None) -> None:
        """`load` for rows as they are stored."""
        self.check_keys(keys)
        self.bounds.note(rows.largest(self.form.widened(stored)))
        whole = (
            stored if self.statistics is None else self._with_columns(stored, self._complete(columns or {}, len(keys)))
        )
        has_room = stored.shape[1] == self._row_words and len(keys) <= self.index.num_free_rows
        if has_room and self.index.load(keys, whole):
            if self.watch is not None:
                self._tell(keys)
            return
        # no eviction during a load: a later save of the chain has the keys of rows that were dropped
        capacity, self._capacity = self._capacity, None
        try:
            self.check_keys(keys, create=True)
            self.index.reserve_for(keys)
            self._put(keys, stored, self._complete(columns or {}, len(keys)))
        finally:
            self._capacity = capacity

    def note_loaded(self) -> int:
        """As RowTable.note_loaded."""
        self.num_loaded = self.num_rows
        return self.num_loaded

    def _with_columns(self, values: Floats, columns: Columns) -> Floats:
        assert self.statistics is not None
        return np.concatenate([values, join_columns(self.statistics.names, columns, len(values))], axis=1)

    def _complete(self, columns: Columns, num: int) -> Columns:
        """Fill in times that were not kept when the table was saved: its rows count as seen and created now."""
        now = np.full(num, self.clock.now, np.uint32)
        return {"seen": now, "born": now, "tick": np.full(num, self.step, np.uint32), **columns}

    # Rows of keys that appear in training

    def appear(self, keys: Keys, worker: int | None = None) -> Rows:
        """Record that keys were looked up for training: admit or count them, create rows, mark them as seen. Returns
        their rows, -1 for a key without one. `worker`: keys without a row wait for `admit_waiting`.
        """
        at = self.find(keys)
        self._see(at)  # first, so that new rows of this batch do not evict its other rows
        missing = at < 0
        if missing.any():
            strangers = unique(keys[missing])[0]
            if worker is not None:
                self.waiting.add(worker, strangers)
            else:
                self._admit(strangers, at)
                at[missing] = found = self.find(keys[missing])
                self._see(found)
        return at

    def _see(self, at: Rows) -> None:
        if self.statistics is not None:
            self.statistics.appear(at, self.clock.now, self.step)
            self._mark(at)

    def _admit(self, keys: Keys, in_use: Rows) -> None:
        """Create rows for the keys that the table's policies admit. `keys` are distinct and have no rows; the rows
        `in_use` are not evicted.
        """
        keys, carried = admitted(keys, in_use, self.admission, self._capacity, self.decisions)
        for start in range(0, len(keys), CHUNK):
            some = slice(start, start + CHUNK)
            at = self._found[: len(keys[some])]
            at[:] = -1
            self._insert(keys[some], at, True)
            if self.statistics is not None:
                for name, column in carried.items():
                    self.statistics.put(name, at, column[some])

    def admit_waiting(self) -> None:
        """As Table.admit_waiting."""
        for keys in self.waiting.take():
            self.appear(keys)

    def forget_waiting(self, worker: int) -> None:
        """As Table.forget_waiting."""
        self.waiting.forget(worker)

    # Rows that are dropped

    def check_erase(self, keys: Keys) -> None:
        """As Table.check_erase."""
        self.check_keys(keys)

    def check_shrink(self, policy: Shrink) -> None:
        """As Table.check_shrink."""
        eviction.check_policy(self, policy)

    def shrink(self, policy: Shrink) -> Iterator[int]:
        """As Table.shrink."""
        return eviction.shrink(self, policy)

    # Rows that are saved

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

    def chunks(
        self, num_rows: int = 1 << 16, save: Literal["full", "delta"] | None = None
    ) -> Iterator[tuple[Keys, Floats, Columns]]:
        """Yield all rows in chunks: (keys, values and state side by side, statistics).

        Rows may be pulled, pushed, added and erased between two chunks: a row that exists throughout comes exactly
        once, with consistent value and state. `save`: the rows are written by this kind of save; a delta gets only the
        rows that it must write.
        """
        for keys, stored, columns in self.stored_chunks(num_rows, save):
            yield keys, self.form.widened(stored), columns

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

    def mark_all(self) -> None:
        """Mark all rows as changed."""
        for some in self.slices(1 << 16):
            self._mark(self.index.alive(some)[1])

    # Decisions of another server

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
