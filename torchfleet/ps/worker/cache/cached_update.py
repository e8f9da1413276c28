"""One step of a table with a cache: the gradients of its rows, and the update by them."""

from __future__ import annotations

from dataclasses import dataclass

from torchfleet.ps.worker.cache.pending import Pending
from torchfleet.ps.worker.cache.row_cache import RowCache


@dataclass
class CachedUpdate:
    """One step of a table with a cache, before it is made."""

    cache: RowCache
    pending: list[Pending]
    lr: float

    def apply(self) -> None:
        self.cache.update(self.pending, self.lr)

    def is_finite(self) -> bool:
        """Whether all gradients are finite, as far as is known without waiting for a device. For gradients on a GPU,
        RowMemory.update checks it.
        """
        return not self.cache.memory.is_exact or all(part.is_finite() for part in self.pending)

    def scale(self, factor: float) -> bool:
        """Multiply the gradients. Returns whether the result is finite; waits for the device."""
        for part in self.pending:
            part.grads.mul_(factor)
        return all(part.is_finite() for part in self.pending)
