"""Checks before an update whether all numbers of a table stay finite.

A table keeps bounds on the magnitudes that it holds. An update raises them by the most that its rule can add, which
takes a few operations whatever the update's size. Only if a bound comes near the float32 maximum is the update tried on
a copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import rows
from torchfleet.ps.kernels.merge import sum_by_key
from torchfleet.ps.tables.settings.spec import Floats, TableSpec

LIMIT = 2.0**126  # a quarter of the largest float32
AHEAD = 1000  # updates to allow at once
MAX_SHOWS = 2.0**50  # of a key in one push: float32 sums of them stop growing long before they overflow


class UpdateBounds:
    """Bounds on the magnitude of the values of a table, and of each number of their state.

    Most updates resemble the previous one. So the bounds of rows are raised for many updates at once, up to a limit on
    their rates and gradients; each of these updates then costs one comparison.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._rule, self._is_dense = spec.rule, spec.is_dense
        first = spec.rule.row_rule.initial_state(spec.rule)
        self._held = [spec.initializer.largest, *[first] * (spec.num_states + spec.num_row_states)]
        # updates that the bounds already allow, up to this rate and gradient
        self._num_ahead, self._rate, self._grad = 0, 0.0, 0.0

    def note(self, largest: float) -> None:
        """Record that values or state up to this magnitude were written."""
        self._num_ahead = 0
        self._held = [max(bound, largest) for bound in self._held]

    def measure(self, *largest: float) -> None:
        """Set the bounds to the measured magnitudes of values and of each number of state."""
        self._num_ahead = 0
        self._held = list(largest)

    def allow_update(self, rate: float, step: int, grad: float) -> bool:
        """Whether an update with gradients up to `grad` is sure to keep everything finite; if so, it
        counts as applied.
        """
        if self._num_ahead and grad <= self._grad and rate <= self._rate:
            self._num_ahead -= 1
            return True
        return grad <= LIMIT and (self._allow_many(2 * rate, step, 16 * grad) or self._allow(rate, step, grad))

    def allow_addition(self, largest: float) -> bool:
        """As `allow_update`, for differences that are added to values."""
        return self._move([self._held[0] + 2 * largest, *self._held[1:]])

    def _allow(self, rate: float, step: int, grad: float) -> bool:
        return self._move(self._rule.row_rule.reach(self._rule, rate, step, grad, self._held))

    def _allow_many(self, rate: float, step: int, grad: float) -> bool:
        """Raise the bounds for many updates at once. Not with decay or on blocks: there a later update may add more
        than this one.
        """
        if self._is_dense or self._rule.weight_decay:
            return False
        reached = self._rule.row_rule.reach(self._rule, rate, step, grad, self._held)
        if reached is None:
            return False
        far = [held + AHEAD * (bound - held) for held, bound in zip(self._held, reached, strict=True)]
        if not self._move(far):
            return False
        self._num_ahead, self._rate, self._grad = AHEAD - 1, rate, grad
        return True

    def _move(self, reached: list[float] | None) -> bool:
        if reached is None or not sum(reached) <= LIMIT:  # also False if one of them is NaN
            return False
        self._held = reached
        return True


def check_block(spec: TableSpec, keys: npt.NDArray[np.uint64], block: Floats, num_words: int, what: str) -> float:
    """The largest magnitude in a block with one row per key. Raises TableError if a number is not finite."""
    if block.ndim != 2 or block.shape != (len(keys), num_words):
        raise TableError(
            f"table '{spec.name}' expects {what} of shape ({len(keys)}, {num_words}) for {len(keys)} keys, "
            f"found {block.shape}"
        )
    largest = rows.largest(block)
    if not largest < np.inf:
        row = int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
        raise TableError(
            f"table '{spec.name}': NaN or infinity in the row for key {signed(keys, row)} (row {row} of {len(keys)}); "
            "nothing was applied. Look for it in the loss, or clip the gradients."
        )
    return largest


def check_squares(spec: TableSpec, keys: npt.NDArray[np.uint64], block: Floats) -> None:
    """Raise TableError if a sum of squares in the state of these rows is negative, which has no square root."""
    for state in spec.rule.row_rule.squares:
        number = state % (spec.num_states + spec.num_row_states)
        is_of_row = number >= spec.num_states
        first = (
            spec.dim * (1 + number) if not is_of_row else spec.dim * (1 + spec.num_states) + number - spec.num_states
        )
        is_bad = block[:, first : first + (1 if is_of_row else spec.dim)].min(axis=1, initial=0.0) < 0
        if is_bad.any():
            row = int(np.flatnonzero(is_bad)[0])
            raise TableError(
                f"table '{spec.name}': a negative sum of squares in the state of the row for key {signed(keys, row)}; "
                "nothing was applied"
            )


def check_shows(spec: TableSpec, keys: npt.NDArray[np.uint64], pushed: Floats) -> None:
    """Raise TableError if the shows or clicks of a key are implausibly many."""
    sums = sum_by_key(keys, np.ascontiguousarray(pushed))[1]
    if not rows.largest(sums) <= MAX_SHOWS:
        raise TableError(f"table '{spec.name}': expected at most {MAX_SHOWS:.2g} shows or clicks of a key in a push")


def signed(keys: npt.NDArray[np.uint64], row: int) -> int:
    """A key as a signed id, as users give it."""
    return int(keys[row : row + 1].view(np.int64)[0])
