"""The interface of every kind of table: all that a server's commands, log, saves and loads know of a table.

A new kind is one file with a class that has these methods, and a line in tables/kinds.py. A table belongs to one
thread. A method that raises FleetError has changed nothing.
"""

# ruff: noqa: B027  (a method that a kind may leave out does nothing)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.base.monitor.freshness import EXACT_AGES
from torchfleet.ps.tables.policies.decisions import Noted
from torchfleet.ps.tables.rows.keymap import Keys, Rows
from torchfleet.ps.tables.rows.wire_rows import pushed_rows
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Floats, TableSpec
from torchfleet.ps.tables.summary import Summary

PartKind = Literal["rows", "gone", "candidates", "candidates_gone", "sketch"]
# full: everything. delta: the changes since the last save. inference: values without state. copy: everything, for a
# server that replaces this one; a copy is not a save and does not affect the next delta.
SaveMode = Literal["full", "delta", "inference", "copy"]


@dataclass(slots=True)
class SavedSlice:
    """Arrays on their way from a table to a part file, or back; docs/checkpoints.md lists those of each kind."""

    kind: PartKind
    arrays: dict[str, npt.NDArray[Any]]
    start: int = 0  # for a range of something larger: the position of its first element; each range gets its own file


class RowTable(Protocol):
    """The methods that loading saved rows needs from a table."""

    spec: TableSpec
    step: int

    @property
    def num_words(self) -> int:
        """Numbers per row: values and state."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    def reserve(self, num_rows: int) -> None:
        """Prepare for loading `num_rows` rows."""

    def check_values(self, keys: Keys, values: Floats) -> None:
        """Raise TableError if these cannot be rows of this table. Does not access the rows, so any
        thread may call it.
        """

    def load_slice(self, saved: SavedSlice) -> None:
        """Load a slice that a table of this kind saved, of keys that this shard owns. Statistics that this table does
        not keep are ignored. Raises TableError if the slice does not fit.
        """

    def note_loaded(self) -> int:
        """Called after all slices are loaded; returns the number of rows."""


class BlockTable(Protocol):
    """The methods that loading a saved block needs from a table."""

    spec: TableSpec
    step: int
    loaded: list[tuple[int, int]]  # ranges of the whole table that were loaded

    @property
    def num_states(self) -> int:
        """Numbers of state per value."""

    def load(self, start: int, block: Floats) -> None:
        """Load elements from `start` on: one row of values, and optionally one for each number of state."""


class SavedModel(Protocol):
    """A saved model to load tables from. Both methods raise CheckpointError if it does not fit the table."""

    def load_rows(self, table: RowTable) -> None:
        """Load the rows of the table's name that its shard owns. Does nothing if this table was not requested."""

    def load_block(self, table: BlockTable) -> None:
        """Load the elements of the table's shard, or the requested ones among them."""


class OneSlice:
    """A single slice as a saved model, to load it into a table of the same kind."""

    def __init__(self, saved: SavedSlice) -> None:
        self._saved = saved

    def load_rows(self, table: RowTable) -> None:
        """As SavedModel.load_rows."""
        table.load_slice(self._saved)

    def load_block(self, table: BlockTable) -> None:
        """As SavedModel.load_block."""
        table.load(0, self._saved.arrays["values"])


class Staleness:
    """Histogram of staleness: the number of updates of the table between a pull and the push of its gradients."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def note(self, age: int) -> None:
        place = age if age < EXACT_AGES else 1 << (age.bit_length() - 1)
        self._counts[place] = self._counts.get(place, 0) + 1

    def restore(self, counts: Mapping[int, int]) -> None:
        """Restore the result of `counts`."""
        self._counts = dict(counts)

    def counts(self) -> dict[int, int]:
        """Number of pushes by staleness; from EXACT_AGES on, a key k stands for k to 2k - 1."""
        return dict(sorted(self._counts.items()))


class Table(ABC):
    """One server's shard of a table.

    `keys` are the numbers in a section of a request: for rows, their keys; for a dense table, a range (start, stop) to
    pull, a start to assign from, or nothing to push. A request of several sections is checked as a whole before any of
    it is applied: each command has a method that checks it, and the command itself relies on that check.

    The default methods suit a kind that counts no appearances, drops no rows and writes all of its rows at every save.
    """

    foresees = False  # whether `foresee` does anything

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.step = 0  # updates so far
        self.num_loaded = 0  # rows that came from a saved model
        self.staleness = Staleness()
        # Called with the table's number, the keys of rows that changed or were dropped, and their row numbers, or None
        # if these are not known or may change. No keys: the block of a dense table changed. The arrays are valid only
        # during the call.
        self.watch: Callable[[int, Keys, Rows | None], None] | None = None
        self.pushed_rows = pushed_rows(spec)

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows, or elements of a dense table, that this shard holds."""

    # Commands of workers

    @abstractmethod
    def check_pull(self, keys: Keys, create: bool) -> int:
        """The size of `pull`'s result in bytes. Raises TableError or WireError if `pull` would fail."""

    @abstractmethod
    def pull(self, keys: Keys, create: bool, worker: int | None) -> Floats:
        """Values in a new array, one row per key, for keys that `check_pull` accepted. Keys may repeat.

        `create`: missing keys get a row if the table admits them, and all appearances are counted; otherwise missing
        keys read as zeros and nothing changes. `worker`: the pull belongs to a step that all workers make together. Its
        appearances take effect with `admit_waiting`, so that the order of the workers does not matter.
        """

    def foresee(self, keys: Keys) -> None:
        """Begin to read the rows that a request in the queue will pull, if they are not in memory."""

    def pull_encoded(self, keys: Keys, create: bool, worker: int | None) -> npt.NDArray[Any]:
        """`pull`, as the reply has it: float32, or the bytes of narrower rows (rows/wire_rows.py)."""
        return self.pull(keys, create, worker)

    def pull_foreseen(self, keys: Keys, create: bool, worker: int | None) -> npt.NDArray[Any]:
        """`pull_encoded` for keys that may not be looked up after all: missing keys read their first values, and
        nothing changes. The default method creates rows as `pull_encoded` does.
        """
        return self.pull_encoded(keys, create, worker)

    def pull_rows(self, keys: Keys, create: bool, worker: int | None) -> Floats:
        """As `pull`, with the state of each row behind its values (flag STATE): shape (keys, num_words)."""
        self._refuse("give the state of rows")

    def admit_waiting(self) -> None:
        """End a step of all workers: count the appearances of its pulls, in the order of the workers."""

    def forget_waiting(self, worker: int) -> None:
        """Discard what a worker pulled in the current step: its process ended within the step."""

    def whole(self) -> Floats | None:
        """All values of a dense table as one column, in a new array; None for a table of rows."""
        return None

    @abstractmethod
    def check_push(self, keys: Keys, grads: Floats, lr: float | None) -> None:
        """Raise TableError if `update` cannot apply this, or if a result would not be finite."""

    @abstractmethod
    def check_add(self, keys: Keys, deltas: Floats) -> None:
        """Raise TableError if `add` cannot apply this."""

    def check_write(self, keys: Keys, values: Floats, are_differences: bool) -> None:
        """Raise TableError if `write` cannot apply this. Only dense tables take what scripts write."""
        raise TableError(f"'{self.spec.name}' is a table of rows: only values of dense tables are written this way")

    @abstractmethod
    def update(self, keys: Keys, grads: Floats, lr: float | None) -> None:
        """One update by the table's rule; `lr` overrides the rule's own. Gradients of equal keys are summed."""

    @abstractmethod
    def add(self, keys: Keys, deltas: Floats) -> None:
        """One update that adds differences learned by another copy of the values. `check_add` comes before it, because
        a message is checked as a whole before any of it is applied."""

    def write(self, keys: Keys, values: Floats, are_differences: bool) -> None:
        """Take what a script has written into parameters: values, NaN where it has written none, or differences.

        It is no update: the optimizer's state and number of steps stay.
        """
        self.check_write(keys, values, are_differences)

    def close(self) -> None:
        """Release what the table holds outside of memory. It is not used afterwards."""

    def mean(self, pushes: Sequence[tuple[Keys, Floats]]) -> tuple[Keys, Floats]:
        """One push with the mean gradient of several workers' pushes, summed in order: (keys, gradients). The columns
        behind the gradients (shows, clicks) are summed.
        """
        keys = np.concatenate([keys for keys, _ in pushes])
        grads = np.concatenate([grads for _, grads in pushes])
        grads[:, : self.spec.dim] *= np.float32(1.0 / len(pushes))
        return keys, grads

    @abstractmethod
    def check_assign(self, keys: Keys, values: Floats) -> None:
        """Raise TableError or WireError if `assign` cannot apply this."""

    @abstractmethod
    def assign(self, keys: Keys, values: Floats) -> None:
        """Overwrite values. Among equal keys the last one wins."""

    def check_assign_state(self, keys: Keys, states: Floats) -> None:
        """Raise TableError or WireError if `assign_state` cannot apply this."""
        self._refuse("take the state of rows alone")

    def assign_state(self, keys: Keys, states: Floats) -> None:
        """Overwrite the state of rows, shape (keys, num_words - dim); keys without a row are ignored."""
        self._refuse("take the state of rows alone")

    # Commands over whole tables

    def check_erase(self, keys: Keys) -> None:
        """Raise TableError if `erase` cannot apply this."""
        self._refuse("erase rows")

    def erase(self, keys: Keys) -> int:
        """Drop rows; absent keys are ignored. Returns how many rows were dropped."""
        self._refuse("erase rows")

    def check_shrink(self, policy: Shrink) -> None:
        """Raise TableError if the table does not keep the statistics that the policy reads."""
        self._refuse("drop rows by a policy")

    def shrink(self, policy: Shrink) -> Iterator[int]:
        """Drop rows by a policy, in slices; yields the number dropped after each. Other calls may come in between."""
        self._refuse("drop rows by a policy")

    @abstractmethod
    def walk(self, cursor: int, num_rows: int) -> tuple[Keys, Floats, int]:
        """(keys, values, next cursor) of at most `num_rows` rows, or of a few hundred if that is more. Start with
        cursor 0; the last call returns 0.

        Other calls may come in between: a row that exists throughout comes exactly once. Raises TableError if the table
        has no rows by key.
        """

    def walk_rows(self, cursor: int, num_rows: int) -> tuple[Keys, Floats, int]:
        """As `walk`, with the state of each row behind its values (flag STATE): shape (keys, num_words)."""
        self._refuse("give the state of rows")

    @abstractmethod
    def summarize(self, summary: Summary, num_rows: int) -> Iterator[None]:
        """Add all rows to a summary, in slices of `num_rows`. Other calls may come in between."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Statistics for users; contains at least "bytes", the memory in use."""

    def described(self) -> dict[str, Any]:
        """The numbers that every table has, and its `stats`."""
        known = {"kind": self.spec.kind, "is_dense": self.spec.is_dense, "rows": self.num_rows, "step": self.step}
        return {**known, "loaded": self.num_loaded, "staleness": self.staleness.counts(), **self.stats()}

    # Saves and loads

    num_dropped = 0  # rows dropped so far: the key of each may come twice in a save that is being written

    def begin_save(self, is_committed: bool) -> None:
        """Begin a save: later changes belong to the next one. `is_committed`: the previous save is durable."""

    @abstractmethod
    def save_slices(self, mode: SaveMode, num_rows: int) -> Iterator[SavedSlice]:
        """Yield what a save must write, in slices of about `num_rows` rows. Other calls may come in between.

        Slices of one kind come one after the other. A table without rows yields one empty slice of rows.
        """

    @abstractmethod
    def restore(self, model: SavedModel) -> None:
        """Load this table's share of a saved model, with the method of `model` that suits this kind."""

    # A server's log and its replicas

    def begin_noting(self) -> None:
        """Start recording decisions that depend on more than the request: evicted rows, admitted keys."""

    def end_noting(self) -> Noted | None:
        """The decisions since `begin_noting`; None if nothing was decided."""
        return None

    def follow(self, noted: Noted) -> None:
        """Follow recorded decisions until `follow_no_more`: another server has already applied the next requests."""

    def follow_no_more(self) -> None:
        """Stop following: the recorded requests have been applied."""

    def export_notes(self) -> dict[str, Any]:
        """The table's state beside its rows, as plain values, for a server that replaces this one."""
        return {"step": self.step, "num_loaded": self.num_loaded, "staleness": self.staleness.counts()}

    def restore_notes(self, notes: dict[str, Any]) -> None:
        """Restore the result of `export_notes` into a table that has no rows yet."""
        self.step, self.num_loaded = notes["step"], notes["num_loaded"]
        self.staleness.restore(notes["staleness"])

    def end_copy(self, notes: dict[str, Any]) -> None:
        """Called when all rows of another server's table are here; `notes` is the `export_notes` of that table."""

    def begin_run(self) -> None:
        """Begin a new run: its workers start from the present values, as if they had been loaded from a saved model."""
        self.num_loaded = self.num_rows

    # Processes that follow the table

    tells_changes = False  # whether the table calls `watch` at every change of a value

    def present(self, keys: Keys) -> tuple[npt.NDArray[np.bool_], Floats]:
        """(mask of the keys that have a row, the values of these). Changes nothing."""
        self._refuse("say which keys have a row")

    def present_at(self, at: Rows) -> tuple[Keys, Floats]:
        """(keys, values) of the rows `at` that are in use. `at`: row numbers that `watch` was called with."""
        self._refuse("say which rows are in use")

    def _tell(self, keys: Keys, at: Rows | None = None) -> None:
        """Call `watch` with a change. Most tables have no `watch`: callers check that first."""
        if self.watch is not None and (len(keys) or self.spec.is_dense):
            self.watch(self.spec.number, keys, at)

    # Between requests

    def settle(self) -> bool:
        """Do less than a millisecond of deferred work while the server is idle. Returns False if there was nothing
        to do.
        """
        return False

    def _refuse(self, what: str) -> NoReturn:
        raise TableError(f"table '{self.spec.name}' is of kind '{self.spec.kind}', which cannot {what}")
