"""What every kind of table offers: all that a server's commands, log, saves and loads know of a table.

A new kind is one file with a class that has these methods, and a line in tables/kinds.py. A table belongs to one
thread. A method that raises FleetError has changed nothing.
"""

# ruff: noqa: B027  (a method that a kind may leave out does nothing)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.base.monitor.freshness import EXACT_AGES
from torchfleet.ps.tables.policies.decisions import Noted
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Floats, TableSpec
from torchfleet.ps.tables.summary import Summary

PartKind = Literal["rows", "gone", "candidates", "candidates_gone", "sketch"]
# All; what changed since the last save; values without state; all, for a server that takes the place of this one: that
# is no save, and the next delta is the same with it.
SaveMode = Literal["full", "delta", "inference", "copy"]


@dataclass(slots=True)
class SavedSlice:
    """Arrays on their way from a table to a part file, or back; docs/checkpoints.md has those of each kind."""

    kind: PartKind
    arrays: dict[str, npt.NDArray[Any]]
    start: int = 0  # of a stretch of something larger: the place of its first element; it gets a file of its own


class RowTable(Protocol):
    """What is needed of a table to load saved rows into it."""

    spec: TableSpec
    step: int

    @property
    def num_words(self) -> int:
        """Numbers per row: values and state."""

    @property
    def num_rows(self) -> int:
        """Rows that are there."""

    def reserve(self, num_rows: int) -> None:
        """So many rows are about to be loaded."""

    def check_values(self, keys: Keys, values: Floats) -> None:
        """Raise TableError if these cannot be rows of this table; touches nothing, so any thread may call it."""

    def load_slice(self, saved: SavedSlice) -> None:
        """Take in what a table of this kind has saved, of keys that this shard owns. Statistics that it does not keep
        are left out. Raises TableError if they do not fit."""

    def note_loaded(self) -> int:
        """All slices are here; returns how many rows there are."""


class BlockTable(Protocol):
    """What is needed of a table to load a saved block into it."""

    spec: TableSpec
    step: int
    loaded: list[tuple[int, int]]  # ranges of the whole table that were loaded

    @property
    def num_states(self) -> int:
        """Numbers of state per value."""

    def load(self, start: int, block: Floats) -> None:
        """Elements from `start` on: a row of values, and one for each number of state, if there are any."""


class SavedModel(Protocol):
    """A saved model, to be read into tables. Both methods raise CheckpointError if it does not fit the table."""

    def load_rows(self, table: RowTable) -> None:
        """Rows of the table's name, as far as its shard owns them; nothing if the table was not asked for."""

    def load_block(self, table: BlockTable) -> None:
        """The elements of the table's shard, or those of them that were asked for."""


class OneSlice:
    """A slice as a saved model, to be read into a table of the kind that it comes from."""

    def __init__(self, saved: SavedSlice) -> None:
        self._saved = saved

    def load_rows(self, table: RowTable) -> None:
        """As SavedModel.load_rows."""
        table.load_slice(self._saved)

    def load_block(self, table: BlockTable) -> None:
        """As SavedModel.load_block."""
        table.load(0, self._saved.arrays["values"])


class Staleness:
    """How old the values were that gradients were computed from: pushes by updates of the table since the pull."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def note(self, age: int) -> None:
        place = age if age < EXACT_AGES else 1 << (age.bit_length() - 1)
        self._counts[place] = self._counts.get(place, 0) + 1

    def restore(self, counts: Mapping[int, int]) -> None:
        """What `counts` gave."""
        self._counts = dict(counts)

    def counts(self) -> dict[int, int]:
        """Pushes by age; from EXACT_AGES on, a key k stands for ages k to 2k - 1."""
        return dict(sorted(self._counts.items()))


class Table(ABC):
    """One server's shard of a table.

    `keys` are the numbers of a section of a request: keys of rows, and of a dense table a range (start, stop) to pull,
    a start to assign from, or nothing to push. Requests of several sections are checked whole before any is applied:
    each command has a method that checks it, and the command itself relies on that.

    Methods that are not abstract suit a kind that counts no appearances, drops no rows and writes all of its rows at
    every save.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.step = 0  # updates so far
        self.num_loaded = 0  # rows that came from a saved model
        self.staleness = Staleness()

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows, or elements of a dense table, that this shard holds."""

    # Commands of workers

    @abstractmethod
    def check_pull(self, keys: Keys, create: bool) -> int:
        """The size of `pull`'s result in bytes. Raises TableError or WireError if it cannot be pulled."""

    @abstractmethod
    def pull(self, keys: Keys, create: bool, worker: int | None) -> Floats:
        """Values in a new array, a row for each key, of keys that `check_pull` has passed. Keys may repeat.

        `create`: missing keys get a row if the table admits them, and all appearances are noted; else missing keys read
        as zeros and nothing changes. `worker`: the pull belongs to a step that all workers make together, and what it
        makes known takes effect with `admit_waiting`, so that the order of the workers does not count.
        """

    def admit_waiting(self) -> None:
        """A step of all workers ends: note the appearances of its pulls, in the order of the workers."""

    def forget_waiting(self, worker: int) -> None:
        """The worker's last process ended within a step: what it pulled in that step does not count."""

    def whole(self) -> Floats | None:
        """All values of a dense table as one column, in a new array; None for a table of rows."""
        return None

    @abstractmethod
    def check_push(self, keys: Keys, grads: Floats, lr: float | None) -> None:
        """Raise TableError if `update` could not take this, or would leave something that is not finite."""

    @abstractmethod
    def check_add(self, keys: Keys, deltas: Floats) -> None:
        """Raise TableError if `add` could not take this."""

    @abstractmethod
    def update(self, keys: Keys, grads: Floats, lr: float | None) -> None:
        """One update by the table's rule; `lr` takes the place of its own. Gradients of equal keys are summed."""

    @abstractmethod
    def add(self, keys: Keys, deltas: Floats) -> None:
        """One update that adds differences, which another copy of the values has learned."""

    def mean(self, pushes: Sequence[tuple[Keys, Floats]]) -> tuple[Keys, Floats]:
        """The keys and gradients of one push with the mean gradient of several workers' pushes, summed in order; what
        stands behind the gradients (shows, clicks) is summed."""
        keys = np.concatenate([keys for keys, _ in pushes])
        grads = np.concatenate([grads for _, grads in pushes])
        grads[:, : self.spec.dim] *= np.float32(1.0 / len(pushes))
        return keys, grads

    @abstractmethod
    def check_assign(self, keys: Keys, values: Floats) -> None:
        """Raise TableError or WireError if `assign` could not take this."""

    @abstractmethod
    def assign(self, keys: Keys, values: Floats) -> None:
        """Overwrite values. Of equal keys the last one stands."""

    # Commands over whole tables

    def check_erase(self, keys: Keys) -> None:
        """Raise TableError if `erase` could not take this."""
        self._refuse("erase rows")

    def erase(self, keys: Keys) -> int:
        """Drop rows; absent keys are passed over. Returns how many were there."""
        self._refuse("erase rows")

    def check_shrink(self, policy: Shrink) -> None:
        """Raise TableError if the table does not keep what the policy looks at."""
        self._refuse("drop rows by a policy")

    def shrink(self, policy: Shrink) -> Iterator[int]:
        """Drop rows by a policy, in slices; after each, how many it has dropped. Other calls may come in between."""
        self._refuse("drop rows by a policy")

    @abstractmethod
    def walk(self, cursor: int, num_rows: int) -> tuple[Keys, Floats, int]:
        """(keys, values, where to go on) of at most so many rows; begin with 0, and 0 comes back at the end.

        Other calls may come in between: a row that is there throughout comes exactly once. Raises TableError if the
        table has no rows.
        """

    @abstractmethod
    def summarize(self, summary: Summary, num_rows: int) -> Iterator[None]:
        """Add all rows to a summary, in slices of so many. Other calls may come in between."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Plain numbers for people, and at least "bytes", the memory that it takes."""

    def described(self) -> dict[str, Any]:
        """What is known of every table, and its `stats`."""
        known = {"kind": self.spec.kind, "is_dense": self.spec.is_dense, "rows": self.num_rows, "step": self.step}
        return {**known, "loaded": self.num_loaded, "staleness": self.staleness.counts(), **self.stats()}

    # Saves and loads

    def begin_save(self, is_committed: bool) -> None:
        """From here on changes belong to the next save. `is_committed`: the one before is on disk for good."""

    @abstractmethod
    def save_slices(self, mode: SaveMode, num_rows: int) -> Iterator[SavedSlice]:
        """What a save must write, in slices of about so many rows. Other calls may come in between.

        Slices of one kind come one after the other. A table without rows has one slice of rows, which is empty.
        """

    @abstractmethod
    def restore(self, model: SavedModel) -> None:
        """Read this table's share of a saved model, by the method of `model` that suits this kind."""

    # A server's log and its replicas

    def begin_noting(self) -> None:
        """From now on note what is decided by more than the request: who must go, who is let in."""

    def end_noting(self) -> Noted | None:
        """What was decided since `begin_noting`; None: nothing."""
        return None

    def follow(self, noted: Noted) -> None:
        """What comes next was applied elsewhere before, and this is what was decided there; until `follow_no_more`."""

    def follow_no_more(self) -> None:
        """All of it has been applied."""

    def export_notes(self) -> dict[str, Any]:
        """What the table knows beside its rows, as plain values, for a server that takes the place of this one."""
        return {"step": self.step, "num_loaded": self.num_loaded, "staleness": self.staleness.counts()}

    def restore_notes(self, notes: dict[str, Any]) -> None:
        """What `export_notes` gave, into a table that has no rows yet."""
        self.step, self.num_loaded = notes["step"], notes["num_loaded"]
        self.staleness.restore(notes["staleness"])

    def end_copy(self, notes: dict[str, Any]) -> None:
        """All rows of the other server's table are here; `notes` is what its `export_notes` gave."""

    def begin_run(self) -> None:
        """The workers of a new run begin with what is here, as if it had been loaded from a saved model."""
        self.num_loaded = self.num_rows

    # Between requests

    def settle(self) -> bool:
        """Do a part, of less than a millisecond, of what can wait until nothing is asked; False: there is nothing."""
        return False

    def _refuse(self, what: str) -> NoReturn:
        raise TableError(f"table '{self.spec.name}' is of kind '{self.spec.kind}', which cannot {what}")
