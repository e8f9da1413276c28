"""One server's part of the dense parameters: a flat float32 block with its optimizer's state."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchfleet.errors import TableError
from torchfleet.kernels.rows import all_finite
from torchfleet.tables.rows.memory import Memory
from torchfleet.tables.rules import Floats, apply_to_block, learning_rate, num_dense_states
from torchfleet.tables.settings.spec import TableSpec
from torchfleet.tables.staleness import Staleness


class DenseTable:
    """Elements 0..size of this part. Every method that raises TableError has changed nothing."""

    def __init__(self, spec: TableSpec, max_bytes: int) -> None:
        self.spec = spec
        self.step = 0
        self.staleness = Staleness()
        self.is_set = False  # nobody has given it values yet
        self.loaded: list[tuple[int, int]] = []  # elements of the whole table that came from a saved model
        self.size = spec.num_elements
        num_rows = 1 + num_dense_states(spec.rule)
        if self.size * num_rows * 4 > max_bytes:
            raise TableError(
                f"dense table '{spec.name}' takes {self.size * num_rows * 4:,} bytes here, max_table_bytes is "
                f"{max_bytes:,}. Raise it, or use more servers."
            )
        block = Memory(4 * num_rows * self.size).array(np.float32)[: num_rows * self.size]
        self._weights, self._states = block[: self.size], block[self.size :].reshape(num_rows - 1, self.size)
        if spec.rule.name == "adagrad" and spec.rule.initial_accumulator:
            self._states[:] = spec.rule.initial_accumulator

    def get(self, start: int, stop: int) -> Floats:
        """A copy of elements start..stop."""
        self.check_range(start, stop)
        return np.array(self._weights[start:stop])

    def check_set(self, start: int, values: Floats) -> None:
        self.check_range(start, start + values.size)
        self._check_finite(values)

    def set(self, start: int, values: Floats) -> None:
        """Overwrite elements from `start` on; the optimizer's state stays."""
        self.check_set(start, values)
        self._weights[start : start + values.size] = values.reshape(-1)
        self.is_set = True

    @property
    def num_states(self) -> int:
        return len(self._states)

    def block(self) -> Floats:
        """A copy of everything: a row of values, and one for each kind of state."""
        return np.concatenate([self._weights[None], self._states])

    def load(self, start: int, block: Floats) -> None:
        """Elements from `start` on, from the rows of a saved block; state only if it has it."""
        stop = start + block.shape[1]
        self.check_range(start, stop)
        self._check_finite(np.ascontiguousarray(block[0]))
        self._weights[start:stop] = block[0]
        if len(block) > 1:
            self._states[:, start:stop] = block[1:]

    def add(self, deltas: Floats) -> None:
        """weights ← weights + delta, for differences that another copy has learned."""
        self.check_push(deltas)
        self.step += 1
        self._weights += deltas.reshape(-1)

    def check_push(self, grads: Floats, lr: float | None = None) -> None:
        if grads.size != self.size:
            raise TableError(
                f"dense table '{self.spec.name}' expects {self.size:,} gradients here, found {grads.size:,}"
            )
        self._check_finite(grads)
        learning_rate(self.spec.rule, lr, 1)

    def push(self, grads: Floats, lr: float | None = None) -> None:
        """One update of the whole block."""
        self.check_push(grads, lr)
        self.update(grads, lr)

    def update(self, grads: Floats, lr: float | None = None) -> None:
        """`push` for what `check_push` has passed: a message is checked whole before any of it is applied."""
        self.step += 1
        rate = learning_rate(self.spec.rule, lr, self.step)
        apply_to_block(self.spec.rule, self._weights, self._states, grads.reshape(-1), rate, self.step)

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

    def _check_finite(self, values: Floats) -> None:
        if not all_finite(values.reshape(-1).view(np.uint32)):
            at = int(np.flatnonzero(~np.isfinite(values.reshape(-1)))[0])
            raise TableError(
                f"dense table '{self.spec.name}': NaN or infinity at element {at:,}; nothing was applied. "
                "Look for it in the loss, or clip the gradients."
            )
