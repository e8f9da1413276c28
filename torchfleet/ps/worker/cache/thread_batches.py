"""One training thread's batches of tables with a cache: the batches of its step, and their gradients until the step."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator

import torch

from torchfleet.ps.worker.cache.cached_batch import CachedBatch
from torchfleet.ps.worker.cache.pending import Pending


class ThreadBatches:
    """The batches by table. Until the step, a batch is known while a graph or pending gradients hold it."""

    def __init__(self) -> None:
        self.is_used = False  # a table of this thread has a cache
        self._step: dict[str, list[weakref.ref[CachedBatch]]] = {}
        self._pending: dict[str, list[CachedBatch | Pending]] = {}
        self._looked_up: dict[str, dict[int, tuple[weakref.ref[CachedBatch], list[torch.Tensor]]]] = {}

    def begin_call(self) -> None:
        """Begin a new call of the model."""
        self._looked_up.clear()

    def keep(self, table: str, batch: CachedBatch) -> None:
        """Use a batch for the lookups of this step. Its gradients wait for the step."""
        self.is_used = True
        found = self._step.setdefault(table, [])
        if all(known() is not batch for known in found):
            found.append(weakref.ref(batch))
            batch.on_gradient = lambda own: self._pending.setdefault(table, []).append(own)

    def known(self, table: str) -> Iterator[CachedBatch]:
        """The batches of this step, the latest first."""
        for reference in reversed(self._step.get(table, [])):
            batch = reference()
            if batch is not None and not batch.is_dropped:
                yield batch

    def note_lookup(self, table: str, batch: CachedBatch, index: torch.Tensor) -> None:
        """Record a lookup for training at these positions of the batch."""
        known = self._looked_up.setdefault(table, {})
        known.setdefault(batch.number, (weakref.ref(batch), []))[1].append(index)

    def looked_up(self, table: str, weight: torch.Tensor) -> list[torch.Tensor]:
        """The distinct rows that were looked up since the call began, differentiable, by batch."""
        parts, seen = [], list[torch.Tensor]()
        for reference, indices in self._looked_up.get(table, {}).values():
            if (batch := reference()) is not None:
                index = torch.unique(torch.cat(indices))
                index = index[index >= 0]  # padding has no row
                for others in seen:  # a key has one slot while a batch with it is alive
                    index = index[~torch.isin(index, others)]
                seen.append(index)
                parts.append(batch.lookup(weight, index))
        return parts

    def joined(self, table: str) -> Pending | None:
        """The pending gradients of a table as one Pending, which stays pending; None if the table has no gradients."""
        found = [made for part in self._pending.get(table, []) if (made := part.pending()) is not None]
        if not found:
            return None
        together = Pending.joined(found)
        # A later backward pass through the same graph starts from zero.
        if len(self._pending[table]) > 1 or together.touched is None:
            self.drop_gradients([table])
            self._pending[table] = [together]
        return together

    def take(self, table: str) -> list[Pending]:
        """The gradients that the step applies to a table: a list of one Pending, or an empty list."""
        together = self.joined(table)
        self._pending.pop(table, None)
        return [] if together is None else [together]

    def drop_gradients(self, tables: Collection[str]) -> None:
        for table in tables:
            for part in self._pending.pop(table, []):
                for batch in part.batches if isinstance(part, Pending) else [part]:
                    batch.drop_gradients()

    def end_step(self, tables: Collection[str]) -> None:
        """Forget the rows of these tables, which are about to change."""
        for table in tables:
            self._step.pop(table, None)
            self._looked_up.pop(table, None)
