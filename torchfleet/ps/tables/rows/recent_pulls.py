"""Rows of recently pulled keys: the push that follows finds them here, without a search."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.rows import all_distinct
from torchfleet.ps.tables.rows.memory import Memory

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

FEWEST_KEYS = 256  # smallest pull that is kept: a search for fewer keys is cheap
MOST_PULLS = 128  # pulls kept, of all workers together
MOST_KEYS = 1 << 20  # keys kept, of all pulls together: 16 MB

Mark = tuple[int, int, int, int]


class RecentPulls:
    """Keys and rows of the last pulls for training. A push removes its own entry; pulls that are never pushed age out.

    Valid as long as no key loses its row. Code that removes a row must call `forget`.
    """

    def __init__(self, max_rows: int) -> None:
        self._pulls: OrderedDict[Mark, tuple[Keys, Rows]] = OrderedDict()
        self._num_keys = 0
        self._bits = Memory(8 * (max_rows // 64 + 1)).array(np.uint64)  # of all_distinct: a bit for each row

    @property
    def num_bytes(self) -> int:
        return 16 * self._num_keys

    def note(self, keys: Keys, rows: Rows) -> None:
        """Remember that these keys are in these rows. Keeps `rows`; copies `keys`, which lies in a message buffer."""
        if not FEWEST_KEYS <= len(keys) <= MOST_KEYS:
            return
        mark = mark_of(keys)
        self._drop(mark)
        self._pulls[mark] = (keys.copy(), rows)
        self._num_keys += len(keys)
        while len(self._pulls) > MOST_PULLS or self._num_keys > MOST_KEYS:
            self._drop(next(iter(self._pulls)))

    def has(self, keys: Keys) -> bool:
        """Whether these keys, in this order, were pulled: all of them have rows."""
        pulled = self._pulls.get(mark_of(keys)) if len(keys) >= FEWEST_KEYS else None
        return pulled is not None and np.array_equal(pulled[0], keys)

    def take(self, keys: Keys) -> Rows | None:
        """The rows of exactly these keys in this order; None if the keys are not known or repeat."""
        pulled = self._drop(mark_of(keys)) if len(keys) >= FEWEST_KEYS else None
        if pulled is None or not np.array_equal(pulled[0], keys):
            return None
        return pulled[1] if all_distinct(pulled[1], self._bits) else None

    def are_distinct(self, rows: Rows) -> bool:
        """Whether no row repeats."""
        return bool(all_distinct(rows, self._bits))

    def forget(self) -> None:
        """Drop all entries: rows were freed, and may belong to other keys."""
        self._pulls.clear()
        self._num_keys = 0

    def _drop(self, mark: Mark) -> tuple[Keys, Rows] | None:
        pulled = self._pulls.pop(mark, None)
        if pulled is not None:
            self._num_keys -= len(pulled[0])
        return pulled


def mark_of(keys: Keys) -> Mark:
    """A cheap fingerprint of a pull. Equality is decided by comparing all keys."""
    return len(keys), int(keys[0]), int(keys[len(keys) // 2]), int(keys[-1])
