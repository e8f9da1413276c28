"""Whether an update leaves all numbers of a table finite, known before it is made.

A table keeps bounds on the magnitudes that it holds. An update moves them by what its rule can add at most, which is
a few operations whatever its size. Only where a bound comes near the end of float32 is the update tried on a copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import rows
from torchfleet.ps.kernels.merge import sum_by_key
from torchfleet.ps.tables.settings.spec import Floats, TableSpec

LIMIT = 2.0**126  # a quarter of the largest float32
AHEAD = 1000  # updates
MAX_SHOWS = 2.0**50  # of a key in one push: sums of them stop growing long before they are infinite


class UpdateBounds:
    """Bounds on the magnitude of the values of a table, and of each number of their state.

    Most updates are like the one before. So the bounds of rows are moved for many updates at once, whose rates and
    gradients stay below some number; each of them then costs a comparison.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._rule, self._is_dense = spec.rule, spec.is_dense
        self._held = [spec.initializer.largest, *[spec.rule.row_rule.initial_state(spec.rule)] * spec.num_states]
        self._num_ahead, self._rate, self._grad = 0, 0.0, 0.0  # updates that the bounds allow already, up to these

    def note(self, largest: float) -> None:
        """Values or state up to this magnitude were written."""
        self._num_ahead = 0
        self._held = [max(bound, largest) for bound in self._held]

    def measure(self, *largest: float) -> None:
        """These are the magnitudes that are there, of values and of each number of state."""
        self._num_ahead = 0
        self._held = list(largest)

    def allow_update(self, rate: float, step: int, grad: float) -> bool:
        """Whether an update with gradients up to `grad` is sure to leave all finite; if so, it counts as made."""
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
        """Decays and the momentum of blocks may add more in a later update than in this one."""
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
        if reached is None or not sum(reached) <= LIMIT:  # nor if one of them is NaN
            return False
        self._held = reached
        return True


def check_block(spec: TableSpec, keys: npt.NDArray[np.uint64], block: Floats, num_words: int, what: str) -> float:
    """The largest magnitude in a block with a line for each key. Raises TableError if one is not finite."""
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
    """Raise TableError if a sum of squares in the state of these rows is negative: its root would be no number."""
    for state in spec.rule.row_rule.squares:
        is_bad = block[:, spec.dim * (1 + state) : spec.dim * (2 + state)].min(axis=1, initial=0.0) < 0
        if is_bad.any():
            row = int(np.flatnonzero(is_bad)[0])
            raise TableError(
                f"table '{spec.name}': a negative sum of squares in the state of the row for key {signed(keys, row)}; "
                "nothing was applied"
            )


def check_shows(spec: TableSpec, keys: npt.NDArray[np.uint64], pushed: Floats) -> None:
    """Raise TableError if the shows or clicks of a key are more than anybody can have seen."""
    sums = sum_by_key(keys, np.ascontiguousarray(pushed))[1]
    if not rows.largest(sums) <= MAX_SHOWS:
        raise TableError(f"table '{spec.name}': expected at most {MAX_SHOWS:.2g} shows or clicks of a key in a push")


def signed(keys: npt.NDArray[np.uint64], row: int) -> int:
    """A key as ids are given."""
    return int(keys[row : row + 1].view(np.int64)[0])
