"""A table of rows by key that is larger than memory: the rows used last are in memory, all others on disk.

Every request has the same result as on a table in memory: rows on disk are brought into memory before a request touches
them. Only the methods that look at all rows differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import rows
from torchfleet.ps.tables.rows.keymap import KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.row_statistics import Columns, split_columns
from torchfleet.ps.tables.rows.tracking import AnyTracking
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Floats, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage, checked_folder, table_roots
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.tables.tiers.cold_rows import ColdRows
from torchfleet.ps.tables.tiers.hot_rows import SWEEP
from torchfleet.ps.tables.tiers.pages import RECORD_HEAD
from torchfleet.ps.tables.tiers.scan import MOST_WAIT
from torchfleet.ps.tables.tiers.tiers import FEWEST_ROWS, Tiers
from torchfleet.ps.tables.tiers.tracking import TieredTracking


class TieredTable(SparseTable):
    """Kind `sparse` with a storage."""

    index: KeyMap
    foresees = True

    def __init__(self, spec: TableSpec, max_bytes: int, clock: Clock | None, storage: TierStorage) -> None:
        memory = min(storage.memory, max_bytes)
        super().__init__(spec, memory, clock)
        if self._capacity is not None:
            raise TableError(
                f"table '{spec.name}' has rows on disk: shrink by delete_after_unseen_days, ttl_days or where, not by "
                "max_rows or max_bytes"
            )
        if self.statistics is not None and "delta" in self.statistics.names:
            raise TableError(f"table '{spec.name}' has rows on disk: its shrink cannot look at delta")
        folder = checked_folder(storage.path, table_roots())
        cold = ColdRows(self.index.width - self.index.offset, folder)
        self.tiers = Tiers(spec.name, self.index, memory, cold)
        self._keeps_numbers = False  # a row that comes back from disk has another number
        if self.tiers.max_hot < FEWEST_ROWS:
            raise TableError(
                f"table '{spec.name}': {memory:,} bytes hold {max(0, self.tiers.max_hot):,} rows of "
                f"{4 * self.index.width:,} bytes; expected room for {FEWEST_ROWS:,}. Give it more memory."
            )

    def _make_index(self, num_words: int, num_columns: int, max_bytes: int) -> KeyMap:
        return KeyMap(num_words + num_columns, max_bytes)

    def _make_tracking(self) -> AnyTracking:
        return TieredTracking(self.tiers)

    @property
    def num_rows(self) -> int:
        return self.tiers.directory.num_keys

    @property
    def _part(self) -> int:
        """How many keys are handled at once in a request that may have any number of keys."""
        return max(1, self.tiers.max_hot // 4)

    # Requests: rows are brought into memory first

    def check_keys(self, keys: Keys, create: bool = False) -> None:
        """As RowStore.check_keys. A lookup that creates no rows leaves the rows where they are, and needs no room."""
        if not create:
            return
        self.tiers.check_batch(keys)
        self.tiers.check_new(keys)
        if self.admission is not None:
            self.admission.check_room(min(len(keys), self.admission.num_free + 1))

    def foresee(self, keys: Keys) -> None:
        """As Table.foresee."""
        self.tiers.foresee(keys)

    def _pull_stored(self, keys: Keys, create: bool, worker: int | None) -> Floats:
        """A pull that creates no rows leaves the rows where they are."""
        if not create:
            return self._peek(keys, self._value_words)[0]
        at = self.tiers.bring(keys, self._value_words)
        if self.admission is not None or self.statistics is not None or (at < 0).any():
            return super()._pull_stored(keys, create, worker)
        out = np.empty((len(keys), self._value_words), np.float32)
        rows.gather(self.index.store, *self._layout, at, out)
        return out

    def _pull_foreseen(self, keys: Keys) -> Floats:
        """Rows on disk come into memory: most of them are pushed next."""
        self.tiers.check_batch(keys)
        self.tiers.bring(keys, self._value_words)
        return super()._pull_foreseen(keys)

    def pull_rows(self, keys: Keys, create: bool = True, worker: int | None = None) -> Floats:
        """As Table.pull_rows."""
        if not create:
            return self.form.widened(self._peek(keys, self._row_words)[0])
        self.tiers.bring(keys, self._row_words)
        return super().pull_rows(keys, create, worker)

    def _peek(self, keys: Keys, num_words: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """The first words of the rows of these keys, which stay where they are; zeros for a key without a row. And
        which keys have a row."""
        out = np.zeros((len(keys), num_words), np.float32)
        at = self.find(keys)
        rows.gather(self.index.store, *self._layout, at, out)
        cold = np.flatnonzero(at < 0)
        distinct, inverse = np.unique(keys[cold], return_inverse=True)
        places, records = self.tiers.look_up(distinct)
        values = np.zeros((len(distinct), num_words), np.float32)
        values[places >= 0] = self._values(records[:, RECORD_HEAD:])[:, :num_words]
        out[cold] = values[inverse]
        is_there = at >= 0
        is_there[cold] = (places >= 0)[inverse]
        return out, is_there

    def admit_waiting(self) -> None:
        """As Table.admit_waiting."""
        for keys in self.waiting:
            self.tiers.check_batch(keys)
            self.tiers.check_new(keys)
        for keys in self.waiting.take():
            self.tiers.bring(keys)
            self.appear(keys)

    def check_push(self, keys: Keys, grads: Floats, lr: float | None = None) -> None:
        """As Table.check_push."""
        self.tiers.check_batch(keys)
        at = self.tiers.bring(keys, self._row_words)
        if self.admission is None and self.statistics is None and not (at < 0).any():
            self.index.recent.note(keys, at)  # so that the update does not search again
        super().check_push(keys, grads, lr)

    def update(self, keys: Keys, grads: Floats, lr: float | None = None) -> None:
        """As Table.update."""
        if not self.index.recent.has(keys):
            self.tiers.bring(keys, self._row_words)
        super().update(keys, grads, lr)

    def check_add(self, keys: Keys, deltas: Floats) -> None:
        """As Table.check_add."""
        self.tiers.check_batch(keys)
        self.tiers.bring(keys)
        super().check_add(keys, deltas)

    def add(self, keys: Keys, deltas: Floats) -> None:
        """As Table.add."""
        self.tiers.bring(keys)
        super().add(keys, deltas)

    def assign(self, keys: Keys, values: Floats, columns: Columns | None = None) -> None:
        """As KeyedTable.assign; more keys than memory holds are assigned in parts."""
        self.check_values(keys, values)
        self.bounds.note(rows.largest(values))
        self._put(keys, self.form.stored(keys, values), columns)

    def _put(self, keys: Keys, stored: Floats, columns: Columns | None) -> None:
        step = self._part
        for start in range(0, len(keys), step):
            some = slice(start, start + step)
            self.tiers.check_batch(keys[some])
            self.tiers.bring(keys[some])
            self.check_keys(keys[some], create=True)
            self.index.reserve_for(keys[some])
            own = None if columns is None else {name: column[some] for name, column in columns.items()}
            super()._put(keys[some], stored[some], own)

    def _put_state(self, keys: Keys, states: Floats) -> None:
        for start in range(0, len(keys), self._part):
            some = slice(start, start + self._part)
            self.tiers.check_batch(keys[some])
            self.tiers.bring(keys[some], self._row_words)
            super()._put_state(keys[some], states[some])

    def reserve(self, num_rows: int) -> None:
        """As KeyedTable.reserve: makes room for all rows in the directory, and in memory for those that fit."""
        self.tiers.directory.reserve(num_rows)
        super().reserve(max(0, min(num_rows, self.tiers.max_hot - self.index.num_keys)))

    def load_stored(self, keys: Keys, stored: Floats, columns: Columns | None = None) -> None:
        """As KeyedTable.load_stored: new rows fill memory first, then the disk."""
        self.bounds.note(rows.largest(self.form.widened(stored)))
        step, complete = self._part, self._complete(columns or {}, len(keys))
        for start in range(0, len(keys), step):
            some = slice(start, start + step)
            self._load(keys[some], stored[some], {name: column[some] for name, column in complete.items()})

    def _load(self, keys: Keys, stored: Floats, columns: Columns) -> None:
        is_new = len(self.absent(keys)) == len(keys)
        has_room = self.index.num_keys + len(keys) <= self.tiers.max_hot
        if not is_new or has_room or stored.shape[1] != self._row_words:
            self._put(keys, stored, columns)
            return
        self.tiers.check_new(keys)
        words = stored if self.statistics is None else self._with_columns(stored, columns)
        self.tiers.add_cold(keys, np.ascontiguousarray(words).view(np.uint32))
        if self.watch is not None:
            self._tell(keys)

    def check_erase(self, keys: Keys) -> None:
        """As Table.check_erase: rows leave memory for those that are dropped next, in parts."""
        self.tiers.cold.reserve(min(len(keys), self._part) + SWEEP)

    def erase(self, keys: Keys) -> int:
        """As Table.erase."""
        num, step = 0, self._part
        for start in range(0, len(keys), step):
            some = np.unique(keys[start : start + step])
            at = self.tiers.bring(some)
            num += self.drop(some[at >= 0], at[at >= 0])
        return num

    def drop(self, keys: Keys, at: Rows) -> int:
        """As RowStore.drop."""
        self.tiers.note_gone(keys, at)
        return super().drop(keys, at)

    def present(self, keys: Keys) -> tuple[npt.NDArray[np.bool_], Floats]:
        """As Table.present; rows on disk stay there."""
        values, is_there = self._peek(keys, self._value_words)
        return is_there, self.form.widened(values[is_there])

    def absent(self, keys: Keys) -> Keys:
        """As RowStore.absent; reads rows on disk, which stay there."""
        missing = keys[self.find(keys) < 0]
        return missing[self.tiers.look_up(missing)[0] < 0]

    def _note_new(self, keys: Keys, at: Rows) -> None:
        self.tiers.note_new(keys, at)

    # All rows

    def stored_chunks(
        self, num_rows: int = 1 << 16, save: Literal["full", "delta"] | None = None
    ) -> Iterator[tuple[Keys, Floats, Columns]]:
        """As KeyedTable.stored_chunks; for a save, slices without rows come while the disk is busy."""
        is_delta = save == "delta" and isinstance(self.tracking, TieredTracking)
        since = self.tracking.since if is_delta else 0  # type: ignore[union-attr]
        for keys, words in self.tiers.all_rows.slices(num_rows, since, MOST_WAIT if save else None):
            yield keys, self._values(words), self._columns(words)

    def judged(self, num_rows: int, with_values: bool) -> Iterator[tuple[Keys, Columns, Floats | None]]:
        """As RowStore.judged; rows on disk stay there."""
        for keys, words in self.tiers.all_rows.slices(min(num_rows, self._part), 0):
            values = self.form.widened(np.ascontiguousarray(self._values(words)[:, : self._value_words]))
            yield keys, self._columns(words), values if with_values else None

    def walk(self, cursor: int, num_rows: int) -> tuple[Keys, Floats, int]:
        """As Table.walk."""
        keys, words, behind = self.tiers.all_rows.walk(cursor, num_rows)
        return keys, self.form.widened(np.ascontiguousarray(self._values(words)[:, : self._value_words])), behind

    def walk_rows(self, cursor: int, num_rows: int) -> tuple[Keys, Floats, int]:
        """As Table.walk_rows."""
        keys, words, behind = self.tiers.all_rows.walk(cursor, num_rows)
        return keys, self.form.widened(np.ascontiguousarray(self._values(words)[:, : self._row_words])), behind

    def mark_all(self) -> None:
        """As KeyedTable.mark_all."""
        assert isinstance(self.tracking, TieredTracking)
        self.tracking.mark_all()

    def check_shrink(self, policy: Shrink) -> None:
        """As Table.check_shrink."""
        super().check_shrink(policy)
        if policy.max_rows is not None or policy.max_bytes is not None:
            raise TableError(f"table '{self.spec.name}' has rows on disk: it cannot be shrunk to max_rows or max_bytes")

    def close(self) -> None:
        """As Table.close: the system then removes the file of cold rows."""
        self.tiers.cold.close()

    def settle(self) -> bool:
        """As Table.settle."""
        return super().settle() or self.tiers.compaction.settle()

    def stats(self) -> dict[str, Any]:
        tiers = self.tiers
        return {
            **super().stats(),
            "rows": tiers.directory.num_keys,
            "bytes": tiers.num_bytes,
            "map_bytes": tiers.directory.num_bytes,
            "hot_rows": self.index.num_keys,
            "cold_rows": tiers.cold.num_live,
            "disk_bytes": tiers.cold.num_bytes,
            "disk_is_direct": tiers.cold.is_direct,
            "rows_read": tiers.num_read,
            "rows_written": tiers.num_written,
        }

    def _values(self, words: Any) -> Floats:
        """Rows as they are stored, from their words."""
        values: Floats = np.ascontiguousarray(words[:, : self._row_words]).view(np.float32)
        return values

    def _columns(self, words: Any) -> Columns:
        if self.statistics is None:
            return {}
        return split_columns(self.statistics.names, np.ascontiguousarray(words[:, self._row_words :]).view(np.float32))
