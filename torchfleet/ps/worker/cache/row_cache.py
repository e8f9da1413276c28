"""A cache of one table's rows on the worker's device: rows come from the servers before a batch needs them, are updated
here, and are written back when their place is needed or the worker hands over.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torchfleet.base.errors import ModelError, TableError
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.cache.cache_thread import CacheThread
from torchfleet.ps.worker.cache.cached_batch import CachedBatch, Pending, Slot
from torchfleet.ps.worker.cache.key_directory import KeyDirectory
from torchfleet.ps.worker.cache.row_memory import RowMemory
from torchfleet.ps.worker.cache.staging import Staging
from torchfleet.ps.worker.cache.write_back import Write, WriteBack
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future
from torchfleet.ps.worker.client.shard import Floats, Keys

_CHUNK = 1 << 16  # rows of one pull
_WRITTEN = 1 << 14  # rows of one write: a pull behind it waits for a few milliseconds
_EVICTED_SHARE = 64  # an eviction frees 1/64 of the slots, or more: several batches then need none
_NEW = -1  # the last use of a slot without a row


class RowCache:
    """Rows that this worker alone changes. Methods are called by the training thread, those with a client by the
    cache's thread, on a stream of its own.

    A batch is prepared in two halves. `begin` finds the distinct keys that are missing, makes room for them and asks
    the servers for their rows; `end` waits for the rows and puts them into their slots. Batches begin and end in the
    order in which they were prepared, so that a batch may use rows that an earlier one has asked for.
    """

    def __init__(
        self,
        spec: TableSpec,
        num_bytes: int,
        device: torch.device,
        step: int,
        thread: CacheThread,
        write_back: WriteBack,
    ) -> None:
        """`step`: the table's number of updates so far."""
        num_slots = num_bytes // RowMemory.bytes_per_row(spec)
        self.spec, self.step, self._thread, self._write_back = spec, step, thread, write_back
        self.memory = RowMemory(spec, max(1, num_slots), device)
        self._directory = KeyDirectory(device)
        self._free = torch.arange(self.memory.num_slots, device=device)
        self._writes: list[Write] = []  # that the servers may not have yet
        self._written_step = step
        self._alive: dict[int, weakref.ref[CachedBatch]] = {}
        self._lock = threading.Lock()
        self._num_batches = 0
        self._updated: Any = None  # CUDA event after the last update
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._staging = None if self._stream is None else Staging(spec.num_words, device, self._stream)
        self.counts = {"looked_up": 0, "missed": 0, "evicted": 0, "written": 0}
        self.seconds = dict.fromkeys(("wait", "begin", "end", "pull", "evict"), 0.0)

    def prepare(self, ids: Sequence[Slot]) -> CachedBatch:
        """Begin to bring the rows of these ids into the cache. Does not wait."""
        with self._lock:
            self._num_batches += 1
            batch = CachedBatch(self.memory, self._num_batches, ids)
            # at most a few batches live at once: those that have ended are forgotten here
            self._alive = {number: known for number, known in self._alive.items() if known() is not None}
            self._alive[batch.number] = weakref.ref(batch)
        given = torch.cuda.current_stream(self.memory.device).record_event() if self._is_cuda else None
        self._thread.prepare(lambda client: self._begin(client, batch, given), lambda error: self._fail(batch, error))
        return batch

    def update(self, pending: Sequence[Pending], lr: float | None) -> None:
        """One update of the table. A step without gradients counts, too."""
        self.step += 1
        if pending:
            joined = Pending.joined(pending)
            self.memory.update(joined.places, joined.grads, joined.touched, lr, self.step)
            if self._is_cuda:
                self._updated = torch.cuda.current_stream(self.memory.device).record_event()

    def flush(self) -> None:
        """Write all changed rows to the servers, and wait until they have them. The rows stay cached."""
        if self._written_step != self.step:
            self._thread.run(self._do_write_back)

    def empty(self) -> None:
        """Flush, and forget all rows: others may change them on the servers."""
        self.flush()
        self._thread.run(lambda client: self._forget())

    def stats(self) -> dict[str, Any]:
        """Counts since the start; `looked_up` counts distinct keys of batches. Milliseconds: `wait` of the training
        thread; of the cache's thread `begin` (in it `evict`) and `end` (in it `pull`, the wait for the servers).
        """
        memory = self.memory
        used = {"slots": memory.num_slots, "bytes": memory.num_slots * RowMemory.bytes_per_row(self.spec)}
        times = {f"{name}_ms": 1000 * seconds for name, seconds in self.seconds.items()}
        return {"rows": len(self._directory), **used, **self.counts, **times}

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start

    def wait_for(self, batch: CachedBatch) -> None:
        """Wait until the rows of a batch are here. Raises the error that prevented them."""
        with self._timed("wait"):
            batch.wait(self._thread.check)

    # In the cache's thread

    def _beside(self) -> Any:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _begin(self, client: Client, batch: CachedBatch, given: Any) -> Any:
        """The first half; returns the second."""
        with self._beside(), self._timed("begin"):
            if self._stream is not None and any(ids.is_cuda for ids, _ in batch.ids):
                self._stream.wait_event(given)
            keys = batch.collect()
            slots = self._directory.find(keys)
            is_missing = slots < 0
            missing = keys[is_missing]
            self.counts["looked_up"] += len(keys)
            self.counts["missed"] += len(missing)
            self.memory.last_use[slots[~is_missing]] = batch.number
            pulls: list[Future[tuple[Floats, int]]] = []
            if len(missing):
                batch.asked = taken = self._take_slots(len(missing), batch)
                slots = slots.masked_scatter(is_missing, taken)
                self._directory.insert(missing, taken)
                self.memory.last_use[taken] = batch.number
                wanted = _host_keys(missing)
                self._await_writes(missing)
                for start in range(0, len(wanted), _CHUNK):
                    pulls.append(client.pull_rows(self.spec.name, wanted[start : start + _CHUNK]))
            batch.places = slots
        return lambda: self._end(batch, pulls)

    def _end(self, batch: CachedBatch, pulls: Sequence[Future[tuple[Floats, int]]]) -> None:
        with self._beside(), self._timed("end"):
            start = 0
            for pull in pulls:
                with self._timed("pull"):
                    rows = torch.from_numpy(pull.result()[0])
                if batch.error is not None:  # its slots are taken back
                    continue
                some = batch.asked[start : start + len(rows)]
                self.memory.words.index_copy_(0, some, rows if self._staging is None else self._staging.moved(rows))
                start += len(rows)
            batch.asked = batch.asked[:0]
            if self._stream is not None:
                batch.event = self._stream.record_event()
        batch.is_ready.set()

    def _fail(self, batch: CachedBatch, error: BaseException) -> None:
        """Give an error to a batch, and to later ones that may count on its rows. Forget the rows that did not come."""
        with self._lock:
            known = [there() for number, there in self._alive.items() if number >= batch.number]
        is_gone = torch.zeros(self.memory.num_slots, dtype=torch.bool, device=self.memory.device)
        for failed in known:
            if failed is not None and not failed.is_ready.is_set():
                failed.error = error
                is_gone[failed.asked] = True
        _, slots = self._directory.erase(is_gone)
        self.memory.last_use[slots] = _NEW
        self._free = torch.cat([self._free, slots])
        for failed in known:
            if failed is not None:
                failed.is_ready.set()

    def _take_slots(self, num: int, batch: CachedBatch) -> torch.Tensor:
        if len(self._free) < num:
            with self._timed("evict"):
                self._evict(num - len(self._free), batch)
        taken, self._free = self._free[:num], self._free[num:]
        return taken

    def _evict(self, num: int, batch: CachedBatch) -> None:
        """Free at least `num` slots: those that were used least recently, by no batch that is alive."""
        self._check_gradients()
        last_use = self.memory.last_use
        candidates = last_use[(last_use > _NEW) & (last_use < self._oldest_alive(batch))]
        if len(candidates) < num:
            raise self._too_small(num - len(candidates))
        wanted = min(len(candidates), max(num, self.memory.num_slots // _EVICTED_SHARE))
        latest = torch.kthvalue(candidates, wanted).values
        keys, slots = self._directory.erase((last_use > _NEW) & (last_use <= latest))
        self._write(keys, slots)
        last_use[slots] = _NEW
        self._free = torch.cat([self._free, slots])
        self.counts["evicted"] += len(slots)

    def _oldest_alive(self, batch: CachedBatch) -> int:
        with self._lock:
            self._alive = {number: known for number, known in self._alive.items() if known() is not None}
            return min(self._alive, default=batch.number)

    def _write(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Send those of these rows that have changed."""
        if self._stream is not None and self._updated is not None:
            self._stream.wait_event(self._updated)
        is_changed = self.memory.is_changed[slots]
        keys, slots = keys[is_changed], slots[is_changed]
        for start in range(0, len(keys), _WRITTEN):
            own = keys[start : start + _WRITTEN]
            self._give(own, self.memory.words.index_select(0, slots[start : start + _WRITTEN]))
        self.memory.is_changed[slots] = False
        self.counts["written"] += len(keys)

    def _give(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        host_keys, host_rows, copied = keys, rows, None
        if self._stream is not None:
            host_keys, host_rows = (
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in (keys, rows)
            )
            copied = self._stream.record_event()
        write = Write(self.spec.name, keys, host_keys, host_rows, copied, self.step)
        self._writes.append(write)
        self._write_back.give(write)

    def _await_writes(self, keys: torch.Tensor | None = None) -> None:
        """Wait until the servers have all rows that were given back, or those of these keys."""
        self._writes = [write for write in self._writes if not write.is_done.is_set()]
        for write in self._writes:
            if keys is None or bool(torch.isin(keys, write.keys).any()):
                self._write_back.wait(write)

    def _do_write_back(self, client: Client) -> None:
        with self._beside():
            self._check_gradients()
            self._write(*self._directory.items())
            nothing = torch.empty(0, self.spec.num_words)
            self._give(torch.empty(0, dtype=torch.int64, device=self.memory.device), nothing)  # tells the step
            self._await_writes()
        self._written_step = self.step

    def _forget(self) -> None:
        with self._lock:
            for known in self._alive.values():
                if (batch := known()) is not None:
                    batch.is_dropped = True
            self._alive = {}
        self._directory = KeyDirectory(self.memory.device)
        self._free = torch.arange(self.memory.num_slots, device=self.memory.device)
        self.memory.last_use.fill_(_NEW)

    def _check_gradients(self) -> None:
        if bool(self.memory.has_failed):
            raise TableError(
                f"NaN or infinity in the gradient of table '{self.spec.name}', in one of the last steps. The rows with "
                "such a gradient were not changed. Look for it in the loss "
                "(torch.autograd.set_detect_anomaly(True) says where it begins), lower the learning rate, or clip the "
                "gradients."
            )

    def _too_small(self, num: int) -> ModelError:
        size = RowMemory.bytes_per_row(self.spec)
        return ModelError(
            f"SparseEmbedding(cache=...) of table '{self.spec.name}' has room for {self.memory.num_slots:,} rows of "
            f"{size:,} bytes, and the batches under way need {num:,} more. Give it more memory, at least "
            f"{2 * (self.memory.num_slots + num) * size:,} bytes, or use smaller batches."
        )


def _host_keys(keys: torch.Tensor) -> Keys:
    found: Keys = keys.cpu().numpy().view(np.uint64)
    return found
