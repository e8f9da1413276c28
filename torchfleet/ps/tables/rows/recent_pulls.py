"""Rows of recently pulled keys: the push that follows finds them here, without a search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.rows import all_distinct
from torchfleet.ps.tables.rows.kept_requests import KeptRequests, Keys
from torchfleet.ps.tables.rows.memory import Memory

Rows = npt.NDArray[np.int64]

MOST_PULLS = 128  # pulls kept, of all workers together
MOST_KEYS = 1 << 20  # keys kept, of all pulls together: 16 MB


class RecentPulls(KeptRequests[Rows]):
    """Keys and rows of the last pulls for training. A push removes its own entry; pulls that are never pushed age out.

    Valid as long as no key loses its row. Code that removes a row must call `forget`.
    """

    def __init__(self, max_rows: int) -> None:
        super().__init__(MOST_PULLS, MOST_KEYS)
        self._bits = Memory(8 * (max_rows // 64 + 1)).array(np.uint64)  # for all_distinct: a bit for each row

    @property
    def num_bytes(self) -> int:
        return 16 * self.num_keys

    def has(self, keys: Keys) -> bool:
        """Whether these keys, in this order, were pulled: all of them have rows."""
        return self.get(keys) is not None

    def take(self, keys: Keys) -> Rows | None:
        """The rows of exactly these keys in this order; None if the keys are not known or repeat."""
        pulled = super().take(keys)
        return pulled if pulled is not None and self.are_distinct(pulled) else None

    def are_distinct(self, rows: Rows) -> bool:
        """Whether no row repeats."""
        return bool(all_distinct(rows, self._bits))
