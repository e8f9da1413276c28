"""Admission: keys without a row are counted here until the table's entry lets them in."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.hashing import chosen
from torchfleet.ps.tables.policies.decisions import Decisions
from torchfleet.ps.tables.policies.window_sketch import WindowSketch
from torchfleet.ps.tables.rows.keymap import KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.row_statistics import Columns, Statistics, candidate_columns
from torchfleet.ps.tables.rows.tracking import Tracking
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.expressions import parse
from torchfleet.ps.tables.settings.policy import ADMISSION_NAMES
from torchfleet.ps.tables.settings.spec import TableSpec

CHUNK = 2048
HOUR = 3600


class Candidates:
    """Keys that appeared and have no row: `[key | statistics]` in a separate map."""

    def __init__(self, spec: TableSpec, max_bytes: int) -> None:
        names = candidate_columns(spec)
        self.index = KeyMap(len(names), max_bytes)
        self.statistics = Statistics(names, self.index, self.index.offset, spec.entry)
        self.tracking: Tracking | None = None

    def find(self, keys: Keys) -> Rows:
        at = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), CHUNK):
            self.index.find(keys[start : start + CHUNK], at[start : start + CHUNK], len(self.statistics.names))
        return at

    def locate(self, keys: Keys, now: int) -> Rows:
        """Candidate rows of `keys`; a key without one gets a new one."""
        at = self.find(keys)
        for start in range(0, len(keys), CHUNK):
            chunk, rows = keys[start : start + CHUNK], at[start : start + CHUNK]
            if (rows < 0).any():
                fresh = self.index.insert_missing(chunk, rows)
                self.statistics.begin(rows[fresh], now, 0)
        return at

    def mark(self, rows: Rows) -> None:
        if self.tracking is not None:
            self.tracking.mark(rows)

    def erase(self, keys: Keys) -> int:
        if self.tracking is not None and len(keys):
            self.tracking.note_gone(keys)
        return self.index.erase(keys)

    def chunks(self, num_rows: int, only_changed: bool) -> Iterator[tuple[Keys, Columns]]:
        """Yield all candidates, or only those that the current save must write, in chunks."""
        start = 0
        while start < self.index.num_row_numbers:
            stop = min(start + num_rows, self.index.num_row_numbers)
            is_some = only_changed and self.tracking is not None
            some = self.tracking.changed(start, stop) if is_some else np.arange(start, stop)  # type: ignore[union-attr]
            keys, at = self.index.alive(some)
            yield keys, self.statistics.read(at)
            start = stop

    def gone(self) -> Keys:
        """Keys that the current save must write as deleted."""
        keys: Keys = self.tracking.gone if self.tracking is not None else np.empty(0, np.uint64)
        return keys[self.find(keys) < 0]

    def load(self, keys: Keys, columns: Columns, now: int) -> None:
        """Insert or overwrite candidates with saved statistics. If the saved columns have no times, they count as seen
        now.
        """
        at = self.locate(keys, now)
        times = np.full(len(keys), now, np.uint32)
        self.statistics.write(at, {"seen": times, "born": times, **columns})


class Admission:
    """Admission for a table whose entry does not admit every key at once."""

    def __init__(self, spec: TableSpec, max_bytes: int, clock: Clock, decisions: Decisions) -> None:
        self._name, self._entry, self._clock, self._decisions = spec.name, spec.entry, clock, decisions
        self.candidates = Candidates(spec, max_bytes) if candidate_columns(spec) else None
        self._predicate = parse(spec.entry.predicate, ADMISSION_NAMES) if spec.entry.predicate else None
        self.sketch: WindowSketch | None = None
        if spec.entry.window_hours:
            seconds = max(4, round(spec.entry.window_hours * HOUR))
            self.sketch = WindowSketch(spec.entry.num_blocks, spec.shard, spec.num_shards, seconds)

    @property
    def num_free(self) -> int:
        """How many more keys can be counted. Unlimited if nothing is counted per key."""
        return sys.maxsize if self.candidates is None else self.candidates.index.num_free_rows

    def check_room(self, num_new: int) -> None:
        """Raise TableError if there is no room to count `num_new` more keys."""
        if self.candidates is not None and num_new > self.num_free:
            raise TableError(
                f"table '{self._name}' has no room to count {num_new:,} more keys; it counts "
                f"{self.candidates.index.num_keys:,}. Drop those unseen for long (fleet.Shrink("
                "delete_after_unseen_days=...)), or count in fixed memory with fleet.WindowCountEntry."
            )

    def begin_save(self, is_committed: bool) -> None:
        if self.candidates is not None:
            if self.candidates.tracking is None:
                self.candidates.tracking = Tracking(self.candidates.index.max_rows)
            self.candidates.tracking.begin(is_committed)

    def stats(self) -> dict[str, int]:
        num, size = 0, 0
        if self.candidates is not None:
            num, size = self.candidates.index.num_keys, self.candidates.index.num_bytes
        return {"candidates": num, "admission_bytes": size + (self.sketch.num_bytes if self.sketch is not None else 0)}

    def admit(self, keys: Keys) -> tuple[Keys, Columns | None]:
        """Count one appearance of each of these distinct keys, none of which has a row.

        Returns the keys that are admitted now, with their statistics so far if any were kept.
        """
        now = self._clock.now
        if self._entry.probability < 1:
            keys = keys[chosen(keys, self._entry.probability)]
        is_due = np.ones(len(keys), np.bool_)
        if self.sketch is not None:
            is_due = self.sketch.count(keys, now) >= self._entry.window_count
        if self._decisions.followed is not None:
            is_due = self._decisions.chosen(keys)
        if self.candidates is None or not len(keys):
            admitted, columns = keys[is_due], None
        else:
            admitted, columns = self._admit_counted(self.candidates, keys, now, is_due)
        self._decisions.note("let_in", admitted, columns)
        return admitted, columns

    def add(self, keys: Keys, pushed: npt.NDArray[np.float32]) -> None:
        """Add show, click and slot of keys that have no row."""
        if self.candidates is not None:
            at = self.candidates.find(keys)
            self.candidates.statistics.add(at, pushed)
            self.candidates.mark(at)

    def _admit_counted(
        self, candidates: Candidates, keys: Keys, now: int, is_due: npt.NDArray[np.bool_]
    ) -> tuple[Keys, Columns | None]:
        """`is_due`: mask of the keys that the window admits. Every appearance is counted here, whatever the window
        decides.
        """
        at = candidates.locate(keys, now)
        columns = candidates.statistics.read(at)
        columns["count"] = columns["count"] + np.uint32(1)
        is_in = is_due
        if self._decisions.followed is None:
            is_in = is_due & (columns["count"] >= self._entry.count)
            if self._predicate is not None:
                is_in &= self._predicate(candidates.statistics.values(columns, now))
        waiting = at[~is_in]
        candidates.statistics.appear(waiting, now, 0)
        candidates.mark(waiting)
        admitted = keys[is_in]
        candidates.erase(admitted)
        if self._decisions.followed is not None:
            return admitted, self._decisions.carried(admitted)
        return admitted, {name: values[is_in] for name, values in columns.items() if name not in ("count", "born")}
