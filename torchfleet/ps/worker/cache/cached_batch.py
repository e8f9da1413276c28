"""One table's rows of one batch, taken from the cache: lookups through them, and their gradients until the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from torchfleet.base.errors import FleetError
from torchfleet.ps.kernels.lookup import NOTHING, add_rows
from torchfleet.ps.worker.batch.bags import Bags
from torchfleet.ps.worker.batch.batch_tensors import Stamp, stamp_of
from torchfleet.ps.worker.cache.row_memory import RowMemory

Slot = tuple[torch.Tensor, int | None]  # ids, and the id among them that stands for padding
_WAIT = 0.1  # seconds between two looks whether the thread that fills the cache has failed


@dataclass
class Pending:
    """Summed gradients of distinct slots, those whose `touched` is True. Holds the batches, so that their rows stay."""

    batches: list[CachedBatch]
    places: torch.Tensor
    grads: torch.Tensor
    touched: torch.Tensor

    def pending(self) -> Pending:
        """Itself."""
        return self

    def whole_gradients(self) -> torch.Tensor:
        """The gradients of all rows, zeros for those without one. What changes it changes the update."""
        self.grads.masked_fill_(~self.touched[:, None], 0.0)
        return self.grads

    def is_finite(self) -> bool:
        """Whether all gradients are; waits for the device."""
        return bool((self.grads.isfinite().all(1) | ~self.touched).all())

    @staticmethod
    def joined(parts: Sequence[Pending]) -> Pending:
        """The gradients of several batches, summed by slot."""
        if len(parts) == 1:
            return parts[0]
        places, inverse = torch.unique(torch.cat([part.places for part in parts]), return_inverse=True)
        grads = torch.ops.aten.embedding_dense_backward(
            torch.cat([part.grads for part in parts]), inverse, len(places), -1, False
        )
        touched = torch.zeros(len(places), dtype=torch.bool, device=places.device)
        touched[inverse[torch.cat([part.touched for part in parts])]] = True
        return Pending([batch for part in parts for batch in part.batches], places, grads, touched)


class CachedBatch:
    """The rows of these ids. While it is alive, its rows stay in the cache.

    The cache's thread fills in `keys` (distinct and sorted) and `places` (their slots in the memory), and then sets
    `is_ready`. `on_gradient` is called at the first gradient.
    """

    def __init__(self, memory: RowMemory, number: int, ids: Sequence[Slot]) -> None:
        self.memory, self.number, self.ids = memory, number, list(ids)
        self.on_gradient: Callable[[CachedBatch], None] = lambda batch: None
        self.is_ready, self.is_dropped = threading.Event(), False
        self.error: BaseException | None = None
        self.event: Any = None  # of the cache's stream, when the rows are there
        self.keys = self.places = torch.empty(0, dtype=torch.int64)
        self.asked = torch.empty(0, dtype=torch.int64, device=memory.device)  # slots whose rows are on their way
        self._index: dict[tuple[Stamp, int | None], torch.Tensor] = {}
        self._values: torch.Tensor | None = None
        self._grads: torch.Tensor | None = None  # one row more than keys, for padding
        self._touched: torch.Tensor | None = None

    @property
    def dim(self) -> int:
        return self.memory.spec.dim

    def collect(self) -> torch.Tensor:
        """The distinct keys of all ids, on the cache's device; called by its thread."""
        device, flat, masks = self.memory.device, [], []
        for ids, padding in self.ids:
            keys = as_keys(ids, device)
            masks.append(None if padding is None else keys != padding)
            flat.append(keys if padding is None else keys[masks[-1]])
        self.keys, inverse = torch.unique(torch.cat(flat), return_inverse=True)
        start = 0
        for (ids, padding), real, mask in zip(self.ids, flat, masks, strict=True):
            index = inverse[start : start + len(real)]
            if mask is not None:
                index = torch.full(mask.shape, len(self.keys), device=device).masked_scatter_(mask, index)
            self._index[stamp_of([ids]), padding] = index
            start += len(real)
        return self.keys

    def wait(self, check: Callable[[], None]) -> None:
        """Wait for the rows. Raises the error that prevented them; `check` raises one if the thread has ended."""
        while not self.is_ready.wait(_WAIT):
            check()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            current = torch.cuda.current_stream(self.memory.device)
            current.wait_event(self.event)
            for tensor in (self.keys, self.places, *self._index.values()):
                tensor.record_stream(current)
            self.event = None

    def index_of(self, slots: Sequence[torch.Tensor], padding: int | None) -> torch.Tensor | None:
        """The position of each id among the keys, the number of keys for padding; None if an id is not among them."""
        found = [self._index.get((stamp_of([ids]), padding)) for ids in slots]
        known = [index for index in found if index is not None]
        if len(known) < len(slots):  # other tensors than those that were prepared: their ids are compared
            known = [self._searched(as_keys(ids, self.memory.device), padding) for ids in slots]
            if any(bool((index < 0).any()) for index in known):
                return None
        return known[0] if len(known) == 1 else torch.cat(known)

    def _searched(self, keys: torch.Tensor, padding: int | None) -> torch.Tensor:
        num = len(self.keys)
        at = torch.searchsorted(self.keys, keys).clamp_(max=max(0, num - 1))
        index = torch.where(self.keys[at] == keys, at, -1) if num else torch.full_like(keys, -1)
        return index if padding is None else torch.where(keys == padding, num, index)

    def lookup(self, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """One row per index, zeros for padding: shape (len(index), dim). `weight` ties it into the graph."""
        found: torch.Tensor = CachedLookup.apply(weight, self, index)  # type: ignore[no-untyped-call]
        return found

    def values(self) -> torch.Tensor:
        """The values of the distinct keys, as they were at the first lookup since the last step, and a row of zeros."""
        if self.is_dropped:
            raise FleetError(f"the rows of table '{self.memory.spec.name}' were replaced after this batch was prepared")
        if self._values is None:
            self._values = torch.nn.functional.pad(self.memory.values(self.places), (0, 0, 0, 1))
        return self._values

    def add(self, index: torch.Tensor, grads: torch.Tensor) -> None:
        """Add a gradient for each index. On a CPU the order of a sum is that of the lookups without a cache."""
        num = len(self.keys) + 1
        if self._grads is None:
            self._grads = torch.full((num, self.dim), float(NOTHING), device=grads.device)
            self._touched = torch.zeros(num, dtype=torch.bool, device=grads.device)
            self.on_gradient(self)
        assert self._touched is not None
        if grads.device.type == "cpu":
            flat, at = np.ascontiguousarray(grads.numpy()).reshape(-1), index.numpy().astype(np.int32)
            add_rows(flat, self.dim, self.dim, at, self._grads.numpy().reshape(-1), self._touched.numpy())
            return
        # sorts by index, so that a sum does not depend on the order of threads
        self._grads += torch.ops.aten.embedding_dense_backward(grads.float(), index, num, -1, False)
        self._touched[index] = True

    def pending(self) -> Pending | None:
        """What the step is to apply; None if no row took part in a backward pass."""
        if self._grads is None or self._touched is None:
            return None
        return Pending([self], self.places, self._grads[:-1], self._touched[:-1])

    def drop_gradients(self) -> None:
        self._grads = self._touched = None


class CachedLookup(torch.autograd.Function):
    """Values of cached rows. Backward leaves the gradients in the CachedBatch."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, batch: CachedBatch, index: torch.Tensor) -> torch.Tensor:
        ctx.batch, ctx.index = batch, index
        return batch.values().index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.batch.add(ctx.index, grads[0])
        return None, None, None


def pooled(rows: torch.Tensor, is_real: torch.Tensor, index: torch.Tensor, bags: Bags) -> torch.Tensor:
    """`rows`, one per id, pooled over bags: shape (samples, slots, dim). Ids that are not real count in no bag."""
    offsets = torch.from_numpy(bags.offsets[:-1].copy()).to(rows.device)
    at, weights = torch.arange(len(rows), device=rows.device), bags.weights
    if bags.pooling == "max":
        rows = rows.masked_fill(~is_real[:, None], -torch.inf)
        out = embedding_bag(at, rows, offsets, mode="max")
        out = out.masked_fill(out.isneginf(), 0.0)
    else:
        if bags.by_freq and rows.requires_grad:
            counts = torch.bincount(index)[index]
            rows.register_hook(lambda gradient: gradient / counts[:, None])  # type: ignore[no-untyped-call]
        own = None if weights is None else weights.reshape(-1).to(rows)
        out = embedding_bag(at, rows, offsets, mode="sum", per_sample_weights=own)
        if bags.pooling == "mean":
            num = embedding_bag(at, is_real.to(rows)[:, None], offsets, mode="sum")
            out = out / num.clamp(min=1.0)
    return out.view(bags.num_slots, -1, rows.shape[1]).transpose(0, 1)


def as_keys(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Ids of any whole type as flat signed 64-bit keys on the device; unsigned ones keep their bits."""
    ids = ids.detach().reshape(-1)
    ids = ids.view(torch.int64) if ids.dtype == torch.uint64 else ids.to(torch.int64)
    return ids.to(device, non_blocking=True)
