"""A table of rows by key, in memory: workers pull rows and push gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import rows
from torchfleet.ps.kernels.merge import segment_sum, sum_by_key, unique
from torchfleet.ps.tables.keyed_table import KeyedTable
from torchfleet.ps.tables.row_updates import row_updates
from torchfleet.ps.tables.rows import kept_requests
from torchfleet.ps.tables.rows.keymap import KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED, is_pushed
from torchfleet.ps.tables.rows.wire_rows import pulled_rows
from torchfleet.ps.tables.rowstore import CHUNK
from torchfleet.ps.tables.saved_rows import export_changes, load_slice, note_all_changed, save_slices
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.rule import learning_rate
from torchfleet.ps.tables.settings.spec import Floats, TableSpec
from torchfleet.ps.tables.summary import Summary
from torchfleet.ps.tables.table import SavedModel, SavedSlice, SaveMode
from torchfleet.ps.tables.update_bounds import MAX_SHOWS, check_block, check_shows


class SparseTable(KeyedTable):
    """A table of rows with admission and an update rule: kinds `sparse` and `array`."""

    def __init__(self, spec: TableSpec, max_bytes: int, clock: Clock | None = None) -> None:
        super().__init__(spec, max_bytes, clock)
        self._updates = row_updates(spec, self.form)
        self._wire = pulled_rows(spec)

    # Pulls

    def check_pull(self, keys: Keys, create: bool) -> int:
        """As Table.check_pull."""
        self.check_keys(keys, create)
        return 4 * len(keys) * self.spec.dim

    def pull(self, keys: Keys, create: bool = True, worker: int | None = None) -> Floats:
        """As Table.pull: values for `keys`, shape (len(keys), dim), in a new array.

        A missing key gets a row with its initial value if the table's entry admits it. With create=False nothing is
        recorded, neither a row nor an appearance, and missing keys read as zeros. `worker`: the pull belongs to a sync
        step, whose result must not depend on the order of the workers: missing keys wait for `admit_waiting`.
        """
        return self.form.widened(self._pull_stored(keys, create, worker))

    def pull_encoded(self, keys: Keys, create: bool = True, worker: int | None = None) -> npt.NDArray[Any]:
        """As Table.pull_encoded."""
        if self._wire is None:
            return self.pull(keys, create, worker)
        if self.spec.format.is_as_stored:
            return self._wire.of_words(self._pull_stored(keys, create, worker))
        return self._wire.encode(keys, self.pull(keys, create, worker))

    def pull_foreseen(self, keys: Keys, create: bool, worker: int | None) -> npt.NDArray[Any]:
        """As Table.pull_foreseen."""
        stored = self._pull_foreseen(keys)
        if self._wire is None:
            return self.form.widened(stored)
        if self.spec.format.is_as_stored:
            return self._wire.of_words(stored)
        return self._wire.encode(keys, self.form.widened(stored))

    def _pull_foreseen(self, keys: Keys) -> Floats:
        """`pull_foreseen`, with values as they are stored."""
        at, out = np.empty(len(keys), np.int64), np.empty((len(keys), self._value_words), np.float32)
        if isinstance(self.index, KeyMap):
            num_missing = self.index.read(keys, at, out)
            if not num_missing and len(keys) >= kept_requests.FEWEST_KEYS:
                self.index.recent.note(keys, at)
        else:
            at = self.find(keys)
            rows.gather(self.index.store, *self._layout, at, out)
            num_missing = int((at < 0).sum())
        if num_missing:
            missing = at < 0
            out[missing] = self.form.first_stored(keys[missing])[:, : self._value_words]
        return out

    def _pull_stored(self, keys: Keys, create: bool, worker: int | None) -> Floats:
        """`pull`, with values as they are stored."""
        out = np.empty((len(keys), self._value_words), np.float32)
        if create and (self.admission is not None or self.statistics is not None):
            at = self.appear(keys, worker if self.admission is not None else None)
            rows.gather(self.index.store, *self._layout, at, out)
            return out
        if isinstance(self.index, KeyMap) and self._capacity is None:
            at = np.empty(len(keys), np.int64)
            num_missing = self.index.read(keys, at, out)
            if num_missing and create:
                self._make_rows(self.index, keys, at, out, num_missing)
            # a sync step ends with one push of all workers' keys, not with the keys of one pull
            if create and worker is None and len(keys) >= kept_requests.FEWEST_KEYS:
                self.index.recent.note(keys, at)
            return out
        for start in range(0, len(keys), CHUNK):
            at = self._locate(keys[start : start + CHUNK], create, self._value_words)
            rows.gather(self.index.store, *self._layout, at, out[start : start + CHUNK])
        return out

    def pull_rows(self, keys: Keys, create: bool = True, worker: int | None = None) -> Floats:
        """As Table.pull_rows. With create=False, keys without a row read as zeros."""
        if create:
            self._pull_stored(keys, create, worker)
        return self.copies(keys, create=False)[0]

    def look_up(self, keys: Keys, create: bool = True) -> Floats:
        """`check_pull`, then `pull`."""
        self.check_pull(keys, create)
        return self.pull(keys, create)

    def _make_rows(self, index: KeyMap, keys: Keys, at: Rows, out: Floats, num_missing: int) -> None:
        """Create rows for the keys whose `at` is negative, and fill in their values; for tables that never evict."""
        index.reserve(min(num_missing, index.num_free_rows))
        for start in range(0, len(keys), CHUNK):
            some = slice(start, start + CHUNK)
            if at[some].min() < 0:
                self._insert(keys[some], at[some], True)
                rows.gather(index.store, *self._layout, at[some], out[some])

    # Pushes

    def check_push(self, keys: Keys, grads: Floats, lr: float | None = None) -> None:
        """Raise TableError if `push` cannot apply this, or if a result would not be finite."""
        is_wide = grads.shape[1:] == (self.spec.dim + NUM_PUSHED,) and is_pushed(self.spec)
        largest = check_block(self.spec, keys, grads, self.spec.dim + NUM_PUSHED * is_wide, "gradients")
        rate = learning_rate(self.spec.rule, lr, self.step + 1)
        self._check_change(keys, create=self.admission is None)
        if not self.bounds.allow_update(rate, self.step + 1, largest * len(keys)):
            self._try(keys, grads, rate)
        if is_wide and largest * len(keys) > MAX_SHOWS:
            check_shows(self.spec, keys, grads[:, self.spec.dim : -1])

    def check_add(self, keys: Keys, deltas: Floats) -> None:
        """As Table.check_add."""
        largest = check_block(self.spec, keys, deltas, self.spec.dim, "differences")
        self._check_change(keys, create=True)
        if not self.bounds.allow_addition(largest * len(keys)):
            self._try(keys, deltas, None)

    def _check_change(self, keys: Keys, create: bool) -> None:
        """`check_keys`, and reserve room in the map for new keys: an error must come before anything is applied."""
        self.check_keys(keys, create)
        if create:
            self.index.reserve_for(keys)

    def _try(self, keys: Keys, grads: Floats, rate: float | None) -> None:
        """Try an update, or without a rate an addition, on copies of the rows. Raises TableError if a result is not
        finite.
        """
        keys, grads = sum_by_key(keys, grads)
        grads = np.ascontiguousarray(grads[:, : self.spec.dim])
        check_block(self.spec, keys, grads, self.spec.dim, "gradients")
        copies, at = self.copies(keys, create=rate is None or self.admission is None)
        self.bounds.note(self._updates.change_copies(copies, keys, at, grads, rate, self.step + 1))

    def push(self, keys: Keys, grads: Floats, lr: float | None = None) -> None:
        """One update: gradients of equal keys are summed, then the rule is applied once per key.

        A table that keeps shows and clicks takes three more columns: show, click and slot of each key.
        """
        self.check_push(keys, grads, lr)
        self.update(keys, grads, lr)

    def update(self, keys: Keys, grads: Floats, lr: float | None = None) -> None:
        """`push` without the check: a message is checked as a whole with `check_push` before any of it is applied."""
        self.step += 1
        rate, change = learning_rate(self.spec.rule, lr, self.step), self._updates.change
        is_many = len(keys) >= kept_requests.FEWEST_KEYS and isinstance(self.index, KeyMap)
        pulled = self.index.recent.take(keys) if is_many else None  # type: ignore[union-attr]
        if pulled is None and is_many and self.is_open and grads.shape[1] == self.spec.dim:
            pulled = self._rows_of_distinct(keys)
        if pulled is not None:
            change(self.index.store, self._layout, keys, pulled, grads, rate, self.step)
            self._mark(pulled)
            if self.watch is not None:
                self._tell_rows(keys, pulled)
            return
        keys, grads = self._take_pushed(keys, grads) if grads.shape[1] > self.spec.dim else sum_by_key(keys, grads)
        if len(keys) <= CHUNK and self.admission is None:
            at = self._locate(keys, True, self._row_words)
            change(self.index.store, self._layout, keys, at, grads, rate, self.step)
            self._mark(at)
            if self.watch is not None:
                self._tell_rows(keys, at)
            return
        for start in range(0, len(keys), CHUNK):
            some = keys[start : start + CHUNK]
            at = self._locate(some, self.admission is None, self._row_words)
            chunk = grads[start : start + CHUNK]
            if self.admission is not None and len(at) and at.min() < 0:
                some, at, chunk = some[at >= 0], at[at >= 0], chunk[at >= 0]  # not admitted: no update
            change(self.index.store, self._layout, some, at, chunk, rate, self.step)
            self._mark(at)
            if self.watch is not None:
                self._tell_rows(some, at)

    def _rows_of_distinct(self, keys: Keys) -> Rows | None:
        """Find the rows of these keys, and make those that are missing. Returns None if a key repeats. A backup applies
        pushes without the pulls before them; comparing rows takes less time than comparing keys."""
        assert isinstance(self.index, KeyMap)
        at = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), CHUNK):
            some = slice(start, start + CHUNK)
            at[some] = self._locate(keys[some], True, 0)
        return at if self.index.recent.are_distinct(at) else None

    def note_updated(self, at: Rows) -> None:
        """Record that table_group.py has updated these rows, of a table of kind `array`."""
        self._mark(at)
        if self.watch is not None:
            self._tell(self.index.alive(at)[0])

    def _take_pushed(self, keys: Keys, wide: Floats) -> tuple[Keys, Floats]:
        """Record the statistics behind the gradients; returns (distinct keys, their summed gradients)."""
        distinct, inverse = unique(keys)
        sums = np.empty((len(distinct), wide.shape[1]), np.float32)
        segment_sum(wide, inverse, sums)
        sums[inverse, -1] = wide[:, -1]  # a slot is a number, so the last one counts, not the sum
        grads, pushed = np.ascontiguousarray(sums[:, : self.spec.dim]), np.ascontiguousarray(sums[:, self.spec.dim :])
        at = self.find(distinct)
        if self.admission is None and (at < 0).any():  # rows dropped since they were pulled: create them again
            for start in range(0, len(distinct), CHUNK):
                self._locate(distinct[start : start + CHUNK], True, self._row_words)
            at = self.find(distinct)
        if self.statistics is not None:
            self.statistics.add(at, pushed)
            self._mark(at)
        if self.admission is not None and (at < 0).any():
            self.admission.add(distinct[at < 0], pushed[at < 0])
        return distinct, grads

    def add(self, keys: Keys, deltas: Floats) -> None:
        """As Table.add: value ← value + delta."""
        self.step += 1
        keys, deltas = sum_by_key(keys, deltas)
        for start in range(0, len(keys), CHUNK):
            some = slice(start, start + CHUNK)
            at = self._locate(keys[some], True, self._value_words)
            self._updates.change(self.index.store, self._layout, keys[some], at, deltas[some], None, self.step)
            self._mark(at)
            if self.watch is not None:
                self._tell_rows(keys[some], at)

    # All rows, and what a copy has beside them

    def summarize(self, summary: Summary, num_rows: int) -> Iterator[None]:
        """As Table.summarize."""
        for keys, values, columns in self.chunks(num_rows):
            summary.add(keys, np.ascontiguousarray(values[:, : self.spec.dim]), columns)
            yield

    def save_slices(self, mode: SaveMode, num_rows: int) -> Iterator[SavedSlice]:
        """As Table.save_slices."""
        return save_slices(self, mode, num_rows)

    def restore(self, model: SavedModel) -> None:
        """As Table.restore."""
        model.load_rows(self)

    def load_slice(self, saved: SavedSlice) -> None:
        """As RowTable.load_slice."""
        load_slice(self, saved)

    def export_notes(self) -> dict[str, Any]:
        """As Table.export_notes, with the keys that lost their rows and the appearances of the current step."""
        own = {"num_evicted": self.num_evicted, "waiting": self.waiting.export()}
        return {**super().export_notes(), **own, **export_changes(self)}

    def restore_notes(self, notes: dict[str, Any]) -> None:
        """As Table.restore_notes."""
        super().restore_notes(notes)
        self.num_evicted = notes["num_evicted"]
        self.waiting.restore(notes["waiting"])

    def end_copy(self, notes: dict[str, Any]) -> None:
        """As Table.end_copy."""
        note_all_changed(self, notes)

    def begin_run(self) -> None:
        """As Table.begin_run."""
        super().begin_run()
        self.waiting.restore({})

    def stats(self) -> dict[str, Any]:
        return {
            "loaded": self.num_loaded,
            "rows": self.index.num_keys,
            "bytes": self.index.num_bytes,
            "evicted": self.num_evicted,
            **(self.admission.stats() if self.admission is not None else {}),
            "load_factor": self.index.load_factor,
            "step": self.step,
            "staleness": self.staleness.counts(),
        }
