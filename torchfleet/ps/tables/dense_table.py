"""One shard of the dense parameters: a flat float32 block with its optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from torchfleet.base.errors import TableError, WireError
from torchfleet.ps.kernels import rows
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.settings.rule import learning_rate
from torchfleet.ps.tables.settings.spec import Floats, TableSpec, shard_range
from torchfleet.ps.tables.settings.table_size import HOW_TO_SET
from torchfleet.ps.tables.summary import Summary
from torchfleet.ps.tables.table import SavedModel, SavedSlice, SaveMode, Table
from torchfleet.ps.tables.update_bounds import UpdateBounds

NO_KEYS: Keys = np.empty(0, np.uint64)
WITH_STATE = 1  # third number of a range: include the optimizer's state
STATE_ALONE = 2  # third number of a place to assign to: the optimizer's state, and no values


class DenseTable(Table):
    """Elements 0..size of this shard. Every method that raises TableError has changed nothing."""

    tells_changes = True

    def __init__(self, spec: TableSpec, max_bytes: int) -> None:
        super().__init__(spec)
        self.is_set = False  # True once a worker has set the values
        self.loaded: list[tuple[int, int]] = []  # ranges of the whole table that were loaded from a saved model
        self.size = spec.num_elements
        num_rows = 1 + spec.num_states
        if self.size * num_rows * 4 > max_bytes:
            raise TableError(
                f"dense table '{spec.name}' takes {self.size * num_rows * 4:,} bytes here, max_table_bytes is "
                f"{max_bytes:,}. Raise it ({HOW_TO_SET}), or use more servers."
            )
        block = Memory(4 * num_rows * self.size).array(np.float32)[: num_rows * self.size]
        self._weights, self._states = block[: self.size], block[self.size :].reshape(num_rows - 1, self.size)
        self._bounds = UpdateBounds(spec)
        initial_state = spec.rule.row_rule.initial_state(spec.rule)
        if initial_state:
            self._states[:] = initial_state

    @property
    def num_rows(self) -> int:
        """As Table.num_rows."""
        return self.size

    def check_pull(self, keys: Keys, create: bool) -> int:
        """As Table.check_pull, for a range (start, stop), or (start, stop, WITH_STATE)."""
        if len(keys) != 2 and not _has_state(keys):
            raise WireError(
                f"expected a range (start, stop) for dense table '{self.spec.name}', found {len(keys)} numbers"
            )
        start, stop = int(keys[0]), int(keys[1])
        self.check_range(start, stop)
        return 4 * (stop - start) * (1 + self.num_states if _has_state(keys) else 1)

    def pull(self, keys: Keys, create: bool, worker: int | None) -> Floats:
        """As Table.pull. Every element exists, so `create` has no effect."""
        start, stop = int(keys[0]), int(keys[1])
        if not _has_state(keys):
            return self.get(start, stop).reshape(-1, 1)
        return np.concatenate([self._weights[None, start:stop], self._states[:, start:stop]]).reshape(-1, 1)

    def whole(self) -> Floats:
        """As Table.whole."""
        return self.get(0, self.size).reshape(-1, 1)

    def get(self, start: int, stop: int) -> Floats:
        """A copy of elements start..stop."""
        self.check_range(start, stop)
        return np.array(self._weights[start:stop])

    def check_assign(self, keys: Keys, values: Floats) -> None:
        """As Table.check_assign. `keys` is the element to start at, or (0, number of steps, WITH_STATE): then `values`
        holds all values and the optimizer state after that number of steps; with STATE_ALONE only the latter.
        """
        if _is_state_alone(keys):
            self._check_block(int(keys[0]), self._with_values(values))
        elif _has_state(keys):
            self._check_block(int(keys[0]), values)
        else:
            self._check_set(_start(keys), values)

    def assign(self, keys: Keys, values: Floats) -> None:
        """As Table.assign, from the given element on."""
        if _is_state_alone(keys):
            block = self._with_values(values)
            self._check_block(int(keys[0]), block)
            self.load(0, block.reshape(1 + self.num_states, self.size))
            self.step = int(keys[1])
        elif _has_state(keys):
            self._check_block(int(keys[0]), values)
            self.load(0, values.reshape(1 + self.num_states, self.size))
            self.step, self.is_set = int(keys[1]), True
        else:
            self.set(_start(keys), values)

    def set(self, start: int, values: Floats) -> None:
        """Overwrite elements from `start` on; the optimizer's state stays."""
        self._check_set(start, values)
        self._bounds.note(rows.largest(values))
        self._weights[start : start + values.size] = values.reshape(-1)
        self.is_set = True
        if self.watch is not None:
            self._tell(NO_KEYS)

    def _with_values(self, states: Floats) -> Floats:
        """A block of this state and the present values."""
        return np.concatenate([self._weights, states.reshape(-1)])

    def _check_block(self, start: int, values: Floats) -> None:
        if start or values.size != (1 + self.num_states) * self.size:
            raise TableError(
                f"dense table '{self.spec.name}' expects all {self.size:,} values with {self.num_states} numbers of "
                f"state each, found {values.size:,} numbers from element {start:,} on"
            )
        self._check_state(values.reshape(1 + self.num_states, self.size))

    def _check_state(self, block: Floats) -> float:
        """The largest magnitude in rows of values and state. Raises TableError if a number is not finite, or a sum of
        squares is negative.
        """
        squares = self.spec.rule.row_rule.squares if len(block) > 1 else ()
        if any(block[1:][state].min(initial=0.0) < 0 for state in squares):
            raise TableError(f"dense table '{self.spec.name}': a negative sum of squares in the state of its elements")
        return self._check_finite(block)

    def _check_set(self, start: int, values: Floats) -> None:
        self.check_range(start, start + values.size)
        self._check_finite(values)

    def walk(self, cursor: int, num_rows: int) -> NoReturn:
        """As Table.walk: always an error."""
        raise TableError(f"'{self.spec.name}' is dense: it has no rows to walk over. Pull its block.")

    def summarize(self, summary: Summary, num_rows: int) -> Iterator[None]:
        """As Table.summarize: a block has no rows to add."""
        return iter(())

    @property
    def num_states(self) -> int:
        return len(self._states)

    def block(self) -> Floats:
        """A copy of the whole block: one row of values, then one row for each number of state."""
        return np.concatenate([self._weights[None], self._states])

    def save_slices(self, mode: SaveMode, num_rows: int) -> Iterator[SavedSlice]:
        """As Table.save_slices: always one slice, because a block is small next to what a server holds."""
        first, _ = shard_range(self.spec.size, self.spec.shard, self.spec.num_shards)
        yield SavedSlice("rows", {"values": self.block()[:1].copy() if mode == "inference" else self.block()}, first)

    def restore(self, model: SavedModel) -> None:
        """As Table.restore."""
        model.load_block(self)

    def export_notes(self) -> dict[str, Any]:
        """As Table.export_notes."""
        return {**super().export_notes(), "is_set": self.is_set, "loaded": self.loaded}

    def restore_notes(self, notes: dict[str, Any]) -> None:
        """As Table.restore_notes."""
        super().restore_notes(notes)
        self.is_set, self.loaded = notes["is_set"], [(start, stop) for start, stop in notes["loaded"]]

    def begin_run(self) -> None:
        """As Table.begin_run. `is_set` is True again when worker 0 has pulled these values and set them."""
        if self.is_set:
            self.loaded = [shard_range(self.spec.size, self.spec.shard, self.spec.num_shards)]
            self.is_set = False

    def load(self, start: int, block: Floats) -> None:
        """Load elements from `start` on from the rows of a saved block. State is loaded only if the block has it."""
        stop = start + block.shape[1]
        self.check_range(start, stop)
        self._bounds.note(self._check_state(np.ascontiguousarray(block)))
        self._weights[start:stop] = block[0]
        if len(block) > 1:
            self._states[:, start:stop] = block[1:]
        if self.watch is not None:
            self._tell(NO_KEYS)

    def add(self, keys: Keys, deltas: Floats) -> None:
        """As Table.add: weights ← weights + delta."""
        self.step += 1
        self._weights += deltas.reshape(-1)
        if self.watch is not None:
            self._tell(NO_KEYS)

    def check_write(self, keys: Keys, values: Floats, are_differences: bool) -> None:
        """As Table.check_write, for a whole block and no keys."""
        if are_differences:
            self.check_add(keys, values)
            return
        self._check_size(keys, values)
        self._check_finite(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf))

    def write(self, keys: Keys, values: Floats, are_differences: bool) -> None:
        """As Table.write."""
        flat = values.reshape(-1)
        if are_differences:
            self._weights += flat
        else:
            is_written = ~np.isnan(flat)
            self._bounds.note(rows.largest(flat[is_written]))
            np.copyto(self._weights, flat, where=is_written)
        if self.watch is not None:
            self._tell(NO_KEYS)

    def check_push(self, keys: Keys, grads: Floats, lr: float | None) -> None:
        """As Table.check_push, for a whole block and no keys."""
        self._check_size(keys, grads)
        largest, step = self._check_finite(grads), self.step + 1
        rate = learning_rate(self.spec.rule, lr, step)
        if self._bounds.allow_update(rate, step, largest):
            return
        self._bounds.measure(rows.largest(self._weights), *map(rows.largest, self._states))
        if not self._bounds.allow_update(rate, step, largest):
            rule, weights, states = self.spec.rule, self._weights.copy(), self._states.copy()
            rule.row_rule.apply_to_block(rule, weights, states, grads.reshape(-1), rate, step)
            self._note_tried(weights, states)

    def check_add(self, keys: Keys, deltas: Floats) -> None:
        """As Table.check_add, for a whole block and no keys."""
        self._check_size(keys, deltas)
        if not self._bounds.allow_addition(self._check_finite(deltas)):
            self._note_tried(self._weights + deltas.reshape(-1), self._states)

    def _check_size(self, keys: Keys, grads: Floats) -> None:
        if len(keys):
            raise TableError(f"dense table '{self.spec.name}' takes a whole block and no keys")
        if grads.size != self.size:
            raise TableError(
                f"dense table '{self.spec.name}' expects {self.size:,} gradients here, found {grads.size:,}"
            )

    def _note_tried(self, weights: Floats, states: Floats) -> None:
        """Record the bounds of an update that was tried on copies. Raises TableError if a result is not finite."""
        largest = rows.largest(weights), *map(rows.largest, states)
        if not all(number < np.inf for number in largest):
            raise TableError(
                f"dense table '{self.spec.name}': values or their state would become NaN or infinite; nothing was "
                "applied. Lower the learning rate, or clip the gradients."
            )
        self._bounds.measure(*largest)

    def push(self, grads: Floats, lr: float | None = None) -> None:
        """One update of the whole block, checked first."""
        self.check_push(NO_KEYS, grads, lr)
        self.update(NO_KEYS, grads, lr)

    def update(self, keys: Keys, grads: Floats, lr: float | None) -> None:
        """As Table.update, of the whole block."""
        self.step += 1
        rule = self.spec.rule
        rate = learning_rate(rule, lr, self.step)
        rule.row_rule.apply_to_block(rule, self._weights, self._states, grads.reshape(-1), rate, self.step)
        if self.watch is not None:
            self._tell(NO_KEYS)

    def mean(self, pushes: Sequence[tuple[Keys, Floats]]) -> tuple[Keys, Floats]:
        """As Table.mean."""
        total = pushes[0][1].copy()
        for _, grads in pushes[1:]:
            total += grads
        return NO_KEYS, total * np.float32(1.0 / len(pushes))

    def stats(self) -> dict[str, Any]:
        return {
            "rows": self.size,
            "bytes": self.size * 4 * (1 + len(self._states)),
            "load_factor": 1.0,
            "step": self.step,
            "is_set": self.is_set,
            "loaded": self.loaded,
            "staleness": self.staleness.counts(),
        }

    def check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            raise TableError(
                f"dense table '{self.spec.name}' holds elements 0 to {self.size:,} here; asked for {start:,} to "
                f"{stop:,}"
            )

    def _check_finite(self, values: Floats) -> float:
        """The largest magnitude in `values`. Raises TableError if one of them is not finite."""
        largest = rows.largest(values)
        if not largest < np.inf:
            at = int(np.flatnonzero(~np.isfinite(values.reshape(-1)))[0])
            raise TableError(
                f"dense table '{self.spec.name}': NaN or infinity at element {at:,}; nothing was applied. "
                "Look for it in the loss, or clip the gradients."
            )
        return largest


def _has_state(keys: Keys) -> bool:
    return len(keys) == 3 and int(keys[2]) == WITH_STATE


def _is_state_alone(keys: Keys) -> bool:
    return len(keys) == 3 and int(keys[2]) == STATE_ALONE


def _start(keys: Keys) -> int:
    if len(keys) != 1:
        raise WireError(f"expected the element to start at, found {len(keys)} numbers")
    return int(keys[0])
