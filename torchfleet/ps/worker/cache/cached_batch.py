"""One table's rows of one batch, taken from the cache: lookups through them, and their gradients until the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from torchfleet.base.errors import FleetError
from torchfleet.ps.kernels.lookup import NOTHING, add_rows
from torchfleet.ps.worker.batch.bags import Bags
from torchfleet.ps.worker.batch.batch_tensors import Stamp, stamp_of
from torchfleet.ps.worker.cache.pending import Pending
from torchfleet.ps.worker.cache.row_memory import RowMemory

Slot = tuple[torch.Tensor, int | None]  # ids, and the id among them that stands for padding
_WAIT = 0.1  # seconds between two checks whether the thread that fills the cache has failed or was closed


class CachedBatch:
    """The rows of the ids of one batch. The rows stay in the cache while this object is alive.

    The cache's thread fills in the slots of the ids (-1 for padding), and then sets `is_ready`. `on_gradient` is called
    at the first gradient.
    """

    def __init__(self, memory: RowMemory, number: int, ids: Sequence[Slot]) -> None:
        self.memory, self.number, self.ids = memory, number, list(ids)
        self.num_ids = sum(ids.numel() for ids, _ in self.ids)
        self.on_gradient: Callable[[CachedBatch], None] = lambda batch: None
        self.is_ready, self.is_dropped = threading.Event(), False
        self.error: BaseException | None = None
        self.given: Any = None  # CUDA event after which the ids are there
        self.event: Any = None  # CUDA event, on the cache's stream, after which the rows are there
        self.asked = torch.empty(0, dtype=torch.int64, device=memory.device)  # slots whose rows are on their way
        self._index: dict[tuple[Stamp, int | None], torch.Tensor] = {}
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None  # distinct keys, sorted, and their slots
        self._places: torch.Tensor | None = None  # distinct slots, sorted, on a CPU
        self._grads: torch.Tensor | None = None  # by place, on a CPU
        self._touched: torch.Tensor | None = None
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # slots and gradients, on a GPU

    @property
    def dim(self) -> int:
        return self.memory.spec.dim

    # In the cache's thread

    def take_slots(self, padding: int | None, slots: torch.Tensor) -> int:
        """Take the slots of this batch's ids with this padding from the beginning of `slots`. Returns how many."""
        start = 0
        for ids, own in self.ids:
            if own == padding:
                self._index[stamp_of([ids]), padding] = slots[start : start + ids.numel()]
                start += ids.numel()
        return start

    @property
    def slots(self) -> Iterable[torch.Tensor]:
        """The slots of all ids, in the order of `take_slots`."""
        return self._index.values()

    # In the training thread

    def wait(self, check: Callable[[], None]) -> None:
        """Wait for the rows. Raises the error that prevented them. `check` raises the error of the cache's thread."""
        while not self.is_ready.wait(_WAIT):
            check()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            current = torch.cuda.current_stream(self.memory.device)
            current.wait_event(self.event)
            for tensor in self._index.values():
                tensor.record_stream(current)
            self.event = None

    def index_of(self, slots: Sequence[torch.Tensor], padding: int | None) -> torch.Tensor | None:
        """The slot of each id, -1 for padding; None if an id is not in this batch."""
        known = [self._index.get((stamp_of([ids]), padding)) for ids in slots]
        found = [index for index in known if index is not None]
        if len(found) < len(slots):  # not the tensors that were prepared: compare their ids
            searched = [self._searched(as_keys(ids, self.memory.device), padding) for ids in slots]
            found = [index for index in searched if index is not None]
            if len(found) < len(slots):
                return None
        return found[0] if len(found) == 1 else torch.cat(found)

    def _searched(self, keys: torch.Tensor, padding: int | None) -> torch.Tensor | None:
        if self._found is None:
            every = torch.cat([as_keys(ids, self.memory.device) for ids, _ in self.ids])
            slots = torch.cat([self._index[stamp_of([ids]), own] for ids, own in self.ids])
            every, slots = every[slots >= 0], slots[slots >= 0]
            distinct, inverse = torch.unique(every, return_inverse=True)
            self._found = distinct, slots.new_empty(len(distinct)).scatter_(0, inverse, slots)
        distinct, own_slots = self._found
        if not len(distinct):
            return None
        at = torch.searchsorted(distinct, keys).clamp_(max=len(distinct) - 1)
        index = torch.where(distinct[at] == keys, own_slots[at], -1)
        is_real = torch.ones_like(keys, dtype=torch.bool) if padding is None else keys != padding
        index = torch.where(is_real, index, -1)
        return None if bool((is_real & (index < 0)).any()) else index

    def lookup(self, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """One row per index, zeros for padding: shape (len(index), dim). `weight` ties it into the graph."""
        found: torch.Tensor = CachedLookup.apply(weight, self, index)  # type: ignore[no-untyped-call]
        return found

    def values(self, index: torch.Tensor) -> torch.Tensor:
        """The values of these slots."""
        if self.is_dropped:
            raise FleetError(f"the rows of table '{self.memory.spec.name}' were replaced after this batch was prepared")
        return self.memory.values(index)

    def add(self, index: torch.Tensor, grads: torch.Tensor) -> None:
        """Add a gradient for each index. On a CPU, a row's gradients are added in the same order as without a cache."""
        if not self._parts and self._grads is None:
            self.on_gradient(self)
        if not self.memory.is_exact:
            self._parts.append((index, grads))
            return
        if self._places is None:
            every = torch.cat(list(self._index.values()))
            self._places = torch.unique(every[every >= 0])
        if self._grads is None or self._touched is None:
            self._grads = torch.full((len(self._places), self.dim), float(NOTHING))
            self._touched = torch.zeros(len(self._places), dtype=torch.bool)
        at = torch.searchsorted(self._places, index).masked_fill_(index < 0, -1).numpy().astype(np.int32)
        flat = np.ascontiguousarray(grads.numpy()).reshape(-1)
        add_rows(flat, self.dim, self.dim, at, self._grads.numpy().reshape(-1), self._touched.numpy())

    def pending(self) -> Pending | None:
        """The gradients that the step applies; None if no row took part in a backward pass."""
        if self._parts:
            slots, grads = ([part[place] for part in self._parts] for place in (0, 1))
            if len(slots) == 1:
                return Pending([self], slots[0], grads[0], None)
            return Pending([self], torch.cat(slots), torch.cat([part.float() for part in grads]), None)
        if self._grads is None or self._places is None:
            return None
        return Pending([self], self._places, self._grads, self._touched)

    def drop_gradients(self) -> None:
        self._grads, self._touched, self._parts = None, None, []


class CachedLookup(torch.autograd.Function):
    """Values of cached rows. Backward leaves the gradients in the CachedBatch."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, batch: CachedBatch, index: torch.Tensor) -> torch.Tensor:
        ctx.batch, ctx.index = batch, index
        return batch.values(index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.batch.add(ctx.index, grads[0])
        return None, None, None


def pooled(rows: torch.Tensor, index: torch.Tensor, bags: Bags) -> torch.Tensor:
    """`rows`, one per index, pooled over bags: shape (samples, slots, dim). Padding (index -1) counts in no bag."""
    offsets = torch.from_numpy(bags.offsets[:-1].copy()).to(rows.device)
    at, weights, is_real = torch.arange(len(rows), device=rows.device), bags.weights, index >= 0
    if bags.pooling == "max":
        rows = rows.masked_fill(~is_real[:, None], -torch.inf)
        out = embedding_bag(at, rows, offsets, mode="max")
        out = out.masked_fill(out.isneginf(), 0.0)
    else:
        if bags.by_freq and rows.requires_grad:
            _, inverse, numbers = torch.unique(index, return_inverse=True, return_counts=True)
            counts = numbers[inverse]
            rows.register_hook(lambda gradient: gradient / counts[:, None])  # type: ignore[no-untyped-call]
        own = None if weights is None else weights.reshape(-1).to(rows)
        out = embedding_bag(at, rows, offsets, mode="sum", per_sample_weights=own)
        if bags.pooling == "mean":
            num = embedding_bag(at, is_real.to(rows)[:, None], offsets, mode="sum")
            out = out / num.clamp(min=1.0)
    return out.view(bags.num_slots, -1, rows.shape[1]).transpose(0, 1)


def keys_together(batches: Sequence[CachedBatch]) -> Iterator[tuple[int | None, torch.Tensor]]:
    """Yield (padding, keys) for each padding_idx: the ids of all batches with this padding, on the cache's device."""
    every = [(batch, ids, padding) for batch in batches for ids, padding in batch.ids]
    for padding in dict.fromkeys(padding for _, _, padding in every):
        flat = [as_keys(ids, batch.memory.device) for batch, ids, own in every if own == padding]
        yield padding, flat[0] if len(flat) == 1 else torch.cat(flat)


def as_keys(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Ids of any whole type as flat signed 64-bit keys on the device; unsigned ones keep their bits."""
    ids = ids.detach().reshape(-1)
    ids = ids.view(torch.int64) if ids.dtype == torch.uint64 else ids.to(torch.int64)
    return ids.to(device, non_blocking=True)
