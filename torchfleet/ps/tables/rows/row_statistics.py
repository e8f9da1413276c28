"""Statistics of a key beside its value: when it was seen, shows, clicks. Kept only if a policy reads them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import rows as row_kernels
from torchfleet.ps.kernels import statistics as kernels
from torchfleet.ps.kernels.statistics import COLUMNS
from torchfleet.ps.tables.rows.keymap import KeyMap, Rows
from torchfleet.ps.tables.rows.keyrange import KeyRange
from torchfleet.ps.tables.rows.packed_map import PackedMap
from torchfleet.ps.tables.settings.clock import DAY
from torchfleet.ps.tables.settings.policy import AdmissionEntry
from torchfleet.ps.tables.settings.spec import TableSpec

Columns = dict[str, npt.NDArray[Any]]  # by name, one value per row
NUM_PUSHED = 3  # columns behind the gradients of a table that keeps them: show, click, slot
MAX_DAYS = 4096  # after this many days a show has decayed to nothing
_FLOATS = ("show", "click", "delta")


def row_columns(spec: TableSpec) -> tuple[str, ...]:
    """The statistics that a row of this table has, in the order of their words."""
    wanted = set()
    if "unseen_days" in spec.shrink.names or spec.entry.show:
        wanted.add("seen")
    if spec.entry.show:
        wanted |= {"show", "click"}
    for name, column in (("age_days", "born"), ("tick", "tick"), ("delta", "delta"), ("slot", "slot")):
        if name in spec.shrink.names:
            wanted.add(column)
    return tuple(name for name in COLUMNS if name in wanted)


def candidate_columns(spec: TableSpec) -> tuple[str, ...]:
    """The statistics of a candidate, a key that was seen and has no row yet. Empty if nothing is counted per key."""
    if spec.entry.count == 1 and not spec.entry.predicate:
        return ()
    wanted = {"count"}
    if {"unseen_days"} & (spec.entry.names | spec.shrink.names) or spec.entry.show:
        wanted.add("seen")
    if {"age_days"} & (spec.entry.names | spec.shrink.names):
        wanted.add("born")
    if spec.entry.show:
        wanted |= {"show", "click"}
    if "slot" in spec.entry.names | spec.shrink.names:
        wanted.add("slot")
    return tuple(name for name in COLUMNS if name in wanted)


def is_pushed(spec: TableSpec) -> bool:
    """Whether workers send show, click and slot of each key behind its gradient."""
    return bool({"show", "slot"} & {*row_columns(spec), *candidate_columns(spec)})


@lru_cache(1024)  # a server asks at every pull
def is_counted(spec: TableSpec) -> bool:
    """Whether a pull for training changes the table even if all keys have rows."""
    return not spec.entry.is_open or bool(row_columns(spec))


class Statistics:
    """The columns `names` of the rows of an index. They lie behind the first `first` words, the key's included."""

    def __init__(
        self, names: tuple[str, ...], index: KeyMap | KeyRange | PackedMap, first: int, entry: AdmissionEntry
    ) -> None:
        self.names = names
        self._index, self._first, self._entry = index, first, entry
        self._words: npt.NDArray[np.uint32] = index.store.view(np.uint32)
        self._places = np.array([first + names.index(name) if name in names else -1 for name in COLUMNS], np.int64)
        self._powers = decay_powers(entry.show_click_decay_rate)
        self._arrays = index.store, self._words, index.width, self._places  # in the order of the kernels' arguments

    def begin(self, rows: Rows, now: int, tick: int) -> None:
        """Initialize the statistics of new rows. `appear` records their first appearance."""
        kernels.begin(*self._arrays, rows, np.uint32(now), np.uint32(tick))

    def appear(self, rows: Rows, now: int, tick: int) -> None:
        """Record that rows were looked up for training. Missing rows (negative) are ignored."""
        kernels.appear(*self._arrays, rows, np.uint32(now), np.uint32(tick), self._powers)

    def add(self, rows: Rows, pushed: npt.NDArray[np.float32]) -> None:
        """Add a step's shows, clicks and slots to the rows that exist."""
        weights = np.float32(self._entry.nonclick_weight), np.float32(self._entry.click_weight)
        kernels.add_shows(*self._arrays, rows, pushed, *weights)

    def read(self, rows: Rows) -> Columns:
        """The stored columns of these rows."""
        block = np.empty((len(rows), len(self.names)), np.float32)
        row_kernels.gather(self._index.store, self._index.width, self._first, rows, block)
        return split_columns(self.names, block)

    def write(self, rows: Rows, columns: Columns) -> None:
        """Overwrite all columns; a column that is not given becomes zeros."""
        block = join_columns(self.names, columns, len(rows))
        row_kernels.scatter(self._index.store, self._index.width, self._first, rows, block)

    def values(self, columns: Columns, now: int) -> Columns:
        """The values that expressions see at `now`, for columns that were `read`."""
        return expression_values(columns, now, self._entry, self._powers)

    def column(self, name: str, rows: Rows) -> npt.NDArray[np.uint32]:
        """One column as words."""
        words: npt.NDArray[np.uint32] = self._words[rows * self._index.width + self._places[COLUMNS.index(name)]]
        return words

    def oldest(self, start: int, stop: int, cut: int, most: int) -> tuple[Rows, int]:
        """(at most `most` rows of start..stop whose tick is at most `cut`; the row after the last one examined)."""
        rows = np.empty(most, np.int64)
        place = self._places[COLUMNS.index("tick")]
        arguments = self._words, self._index.width, place, start, stop, np.uint32(cut), most, rows
        num, behind = kernels.oldest(*arguments)
        return rows[:num], behind

    def put(self, name: str, rows: Rows, values: npt.ArrayLike) -> None:
        """Set one column of these rows, if the table keeps it."""
        place = self._places[COLUMNS.index(name)]
        if place >= 0:
            memory = self._index.store if name in _FLOATS else self._words
            memory[rows * self._index.width + place] = values


def decay_powers(rate: float) -> npt.NDArray[np.float32]:
    """rate ** days, by multiplication in float64: the same on every machine."""
    powers = np.cumprod(np.full(MAX_DAYS, rate, np.float64)) if rate < 1 else np.ones(MAX_DAYS)
    return np.concatenate([[1.0], powers]).astype(np.float32)


def expression_values(columns: Columns, now: int, entry: AdmissionEntry, powers: npt.NDArray[np.float32]) -> Columns:
    """The values that expressions see, from stored columns: decayed shows and clicks, times in days."""
    found: Columns = {name: columns[name] for name in ("count", "delta", "slot") if name in columns}
    if "seen" in columns:
        found["unseen_days"] = _days(columns["seen"], now)
    if "born" in columns:
        found["age_days"] = _days(columns["born"], now)
    if "show" in columns:
        days = np.clip(now // DAY - columns["seen"].astype(np.int64) // DAY, 0, MAX_DAYS)
        found["show"], found["click"] = columns["show"] * powers[days], columns["click"] * powers[days]
        weights = np.float32(entry.nonclick_weight), np.float32(entry.click_weight)
        found["score"] = weights[0] * (found["show"] - found["click"]) + weights[1] * found["click"]
    return found


def split_columns(names: tuple[str, ...], block: npt.NDArray[np.float32]) -> Columns:
    """Split adjacent words into arrays by column name."""
    words = block.view(np.uint32)
    return {name: np.ascontiguousarray((block if name in _FLOATS else words)[:, i]) for i, name in enumerate(names)}


def join_columns(names: tuple[str, ...], columns: Columns, num: int) -> npt.NDArray[np.float32]:
    """The inverse of split_columns; a column that is not given is zeros."""
    block = np.zeros((num, len(names)), np.float32)
    for i, name in enumerate(names):
        if name in columns:
            (block if name in _FLOATS else block.view(np.uint32))[:, i] = columns[name]
    return block


def _days(times: npt.NDArray[np.uint32], now: int) -> npt.NDArray[np.float64]:
    """Days since `times`; a time in the future counts as now."""
    return np.maximum(now - times.astype(np.float64), 0.0) / DAY
