"""A cache of one table's rows on the worker's device: rows come from the servers before a batch needs them, are updated
here, and are written back when their place is needed or the worker hands over.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torchfleet.base.errors import ModelError, TableError, WrongIds
from torchfleet.ps.gpu.staging import Staging
from torchfleet.ps.gpu.table_memory import STEP
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.cache.cache_thread import CacheThread
from torchfleet.ps.worker.cache.cached_batch import CachedBatch, Slot, keys_together
from torchfleet.ps.worker.cache.evicted_keys import NEVER
from torchfleet.ps.worker.cache.evictions import Evictions
from torchfleet.ps.worker.cache.pending import Pending
from torchfleet.ps.worker.cache.row_memory import RowMemory
from torchfleet.ps.worker.cache.write_back import Write, WriteBack
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future
from torchfleet.ps.worker.client.shard import Floats

_CHUNK = 1 << 16  # rows of one pull
_EVICTED_SHARE = 64  # an eviction frees 1/64 of the slots, or more: the next batches then need no eviction


class RowCache:
    """Rows that this worker alone changes. The training thread calls the methods above "In the cache's thread"; the
    cache's thread calls the methods below that, on its own stream.

    Batches are prepared in two halves. `begin` gives slots to the keys that have none and asks the servers for their
    rows; `_end` waits for the rows and puts them into their slots. Batches begin and end in the order in which they
    were prepared, so that a batch may use rows that an earlier one has asked for. When few slots are free, the rows
    used least recently are dropped before the next batch begins.
    """

    def __init__(
        self,
        spec: TableSpec,
        num_bytes: int,
        device: torch.device,
        step: int,
        thread: CacheThread,
        write_back: WriteBack,
        servers_have_rows: bool = True,
    ) -> None:
        """`step`: the table's number of updates so far. `servers_have_rows`: the table is not empty."""
        num_slots = num_bytes // RowMemory.bytes_per_row(spec)
        self.spec, self.step, self._thread, self._write_back = spec, step, thread, write_back
        self.memory = RowMemory(spec, max(1, num_slots), device, step)
        self._evictions = Evictions(self.memory.num_slots, device)
        self._servers_have_rows = servers_have_rows
        self._written_step = step
        self._alive: dict[int, weakref.ref[CachedBatch]] = {}
        self._lock = threading.Lock()
        self._num_batches = 0
        self._updated: Any = None  # CUDA event after the last update
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._staging = None if self._stream is None else Staging(device, self._stream)
        self._looked_up = torch.zeros((), dtype=torch.int64, device=device)
        self.counts = {"missed": 0, "pulled": 0, "evicted": 0, "written": 0}
        self.seconds = dict.fromkeys(("wait", "begin", "end", "pull", "evict"), 0.0)

    def prepare(self, ids: Sequence[Slot]) -> CachedBatch:
        """Begin to bring the rows of these ids into the cache. Does not wait."""
        with self._lock:
            self._num_batches += 1
            batch = CachedBatch(self.memory, self._num_batches, ids)
            # at most a few batches are alive at once: references to others are removed here
            self._alive = {number: known for number, known in self._alive.items() if known() is not None}
            self._alive[batch.number] = weakref.ref(batch)
        if self._is_cuda and any(tensor.is_cuda for tensor, _ in ids):
            batch.given = torch.cuda.current_stream(self.memory.device).record_event()
        self._thread.prepare(self, batch)
        return batch

    def together(self) -> contextlib.AbstractContextManager[None]:
        """In this context, the batches that the caches of this worker prepare reach their thread together."""
        return self._thread.together()

    @property
    def has_room(self) -> bool:
        """Whether the prepared batches would fill less than half of the slots even if no id repeated."""
        with self._lock:
            alive = [batch for known in self._alive.values() if (batch := known()) is not None]
        return sum(batch.num_ids for batch in alive) < self.memory.num_slots // 2

    def update(self, pending: Sequence[Pending], lr: float | None) -> None:
        """One update of the table. A step without gradients counts, too."""
        self.step += 1
        joined = Pending.joined(pending) if pending else self._no_gradients()
        self.memory.update(joined.slots, joined.grads, joined.touched, lr, self.step)
        if self._is_cuda:
            self._updated = torch.cuda.current_stream(self.memory.device).record_event()

    def _no_gradients(self) -> Pending:
        device = self.memory.device
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        return Pending([], nothing, torch.empty(0, self.spec.dim, device=device), None)

    def flush(self) -> None:
        """Write all changed rows to the servers, and wait until they have them. The rows stay cached."""
        if self._written_step != self.step:
            self._thread.run(self._do_write_back)

    def empty(self, step: int | None = None) -> None:
        """Flush, and forget all rows: others may change them on the servers. `step`: the table's number of updates, if
        that was changed there; nothing is flushed then.
        """
        if step is None:
            self.flush()
        self._thread.run(lambda client: self._forget())
        if step is not None:
            self.step = self._written_step = step
            self.memory.table.counters[STEP] = step

    def stats(self) -> dict[str, Any]:
        """Counts since the start: `looked_up` distinct keys of batches, of which `missed` were not here and `pulled`
        came from the servers. Milliseconds: `wait` of the training thread; of the cache's thread `begin` (in it
        `evict`) and `end` (in it `pull`, the wait for the servers).
        """
        memory = self.memory
        used = {"slots": memory.num_slots, "bytes": memory.num_slots * RowMemory.bytes_per_row(self.spec)}
        times = {f"{name}_ms": 1000 * seconds for name, seconds in self.seconds.items()}
        return {"rows": memory.num_rows, **used, "looked_up": int(self._looked_up), **self.counts, **times}

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

    def begin(self, client: Client, batches: list[CachedBatch]) -> Callable[[], None]:
        """Do the first half for several batches at once; returns the second half."""
        new = list[torch.Tensor]()
        with self._beside(), self._timed("begin"):
            for batch in batches:
                if self._stream is not None and batch.given is not None:
                    self._stream.wait_event(batch.given)
            try:
                self._place(batches, new)
                wanted = self._missing(batches[0], new[0] if len(new) == 1 else torch.cat(new))
                pulls = [
                    client.pull_rows(self.spec.name, wanted[start : start + _CHUNK])
                    for start in range(0, len(wanted), _CHUNK)
                ]
                if self.memory.num_free < self.memory.num_slots // _EVICTED_SHARE:
                    self._evict(0)
            except Exception:
                batches[0].asked = batches[0].asked[:0]
                if new:
                    self.memory.erase(torch.cat(new))
                raise
        return lambda: self._end(batches, pulls)

    def _place(self, batches: Sequence[CachedBatch], new: list[torch.Tensor]) -> None:
        """Give slots to all keys of these batches. Adds the newly given slots to `new`, even if it raises an error."""
        memory = self.memory
        for padding, keys in keys_together(batches):
            slots = memory.place(keys, padding)
            new.append(memory.read_counters())
            num_outside = memory.take_outside()
            if num_outside:
                raise WrongIds(
                    f"table '{self.spec.name}' has num_embeddings={self.spec.size:,}, and {num_outside:,} ids are not "
                    f"in 0..{self.spec.size - 1:,}"
                )
            if memory.has_refused:
                slots.clamp_(min=-1)
                is_refused = slots < 0 if padding is None else (slots < 0) & (keys != padding)
                memory.use(slots, batches[0].number)  # so that they stay
                self._evict(len(torch.unique(keys[is_refused])))
                slots = memory.place(keys, padding)
                new.append(memory.read_counters())
            start = 0
            for batch in batches:
                start += batch.take_slots(padding, slots[start:])
        for batch in batches:
            for slots in batch.slots:
                memory.use(slots, batch.number)
            self._looked_up += memory.count_used(batch.number)

    def _missing(self, batch: CachedBatch, new: torch.Tensor) -> Any:
        """The keys of new slots whose rows the servers are asked for. Rows that open writes hold are put into their
        slots here. The remaining keys have no row on the servers, and keep their first values.
        """
        if not len(new):
            return np.empty(0, np.uint64)
        keys = self.memory.keys_of(new)
        evictions = self._evictions.find(keys)
        host_keys, numbers = torch.stack([keys, evictions.long()]).cpu().numpy()
        is_asked = np.ones(len(host_keys), bool) if self._servers_have_rows else numbers != NEVER
        taken, rows = self._evictions.on_their_way(host_keys, numbers)
        is_asked[taken] = False
        asked = is_asked.nonzero()[0]
        places = new[torch.from_numpy(np.concatenate([asked, taken])).to(self.memory.device)]
        batch.asked = places[: len(asked)]
        self.memory.is_changed[new] = True
        self.memory.is_changed[places] = False
        if rows is not None:
            self._put(places[len(asked) :], torch.from_numpy(rows))
        self.counts["missed"] += len(host_keys)
        self.counts["pulled"] += len(asked)
        return host_keys.view(np.uint64)[asked]

    def _put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self.memory.words[slots] = rows if self._staging is None else self._staging.moved(rows)

    def _end(self, batches: Sequence[CachedBatch], pulls: Sequence[Future[tuple[Floats, int]]]) -> None:
        asked = batches[0].asked  # empty if an earlier batch failed: `fail` erased these slots
        with self._beside(), self._timed("end"):
            start = 0
            for pull in pulls:
                with self._timed("pull"):
                    rows = torch.from_numpy(pull.result()[0])
                if len(asked):
                    self._put(asked[start : start + len(rows)], rows)
                    start += len(rows)
            batches[0].asked = asked[:0]
            event = None if self._stream is None else self._stream.record_event()
        for batch in batches:
            batch.event = event
            batch.is_ready.set()

    def fail(self, batches: list[CachedBatch], error: BaseException) -> None:
        """Store an error in these batches, and in later batches, which may use their rows. The cache forgets the rows
        that did not arrive.
        """
        with self._lock:
            known = [there() for number, there in self._alive.items() if number >= batches[0].number]
        failed = [batch for batch in known if batch is not None and not batch.is_ready.is_set()]
        failed += [batch for batch in batches if batch not in failed]
        with self._beside():
            self.memory.erase(torch.cat([batch.asked for batch in failed]))
        for batch in failed:
            batch.asked, batch.error = batch.asked[:0], error
            batch.is_ready.set()

    def _evict(self, num: int) -> None:
        """Drop at least `num` rows: the least recently used, but no row of a batch that is alive. Raises ModelError if
        there are too few.
        """
        with self._timed("evict"):
            self._check_gradients()
            memory = self.memory
            slots = memory.oldest(max(num, memory.num_slots // _EVICTED_SHARE, 1), self._oldest_alive())
            if len(slots) < num:
                raise self._too_small(num - len(slots))
            self._evictions.add(memory.keys_of(slots), self._write(slots))
            memory.erase(slots)
            self.counts["evicted"] += len(slots)

    def _oldest_alive(self) -> int:
        with self._lock:
            self._alive = {number: known for number, known in self._alive.items() if known() is not None}
            return min(self._alive, default=self._num_batches + 1)

    def _write(self, slots: torch.Tensor) -> Write | None:
        """Send the rows of these slots that have changed; None if no row has."""
        if self._stream is not None and self._updated is not None:
            self._stream.wait_event(self._updated)
        slots = slots[self.memory.is_changed[slots]]
        self.counts["written"] += len(slots)
        if not len(slots):
            return None
        self.memory.is_changed[slots] = False
        keys, order = torch.sort(self.memory.keys_of(slots))
        return self._give(keys, self.memory.words.index_select(0, slots[order]))

    def _give(self, keys: torch.Tensor, rows: torch.Tensor) -> Write:
        host_keys, host_rows, copied = keys, rows, None
        if self._stream is not None:
            host_keys, host_rows = (
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in (keys, rows)
            )
            copied = self._stream.record_event()
        write = Write(self.spec.name, host_keys, host_rows, copied, self.step)
        self._write_back.give(write)
        return write

    def _do_write_back(self, client: Client) -> None:
        with self._beside():
            self._check_gradients()
            self._write((self.memory.last_use[:-1] >= 0).nonzero().squeeze(1))
            device, nothing = self.memory.device, torch.empty(0, self.spec.num_words)
            last = self._give(torch.empty(0, dtype=torch.int64, device=device), nothing.to(device))  # tells the step
            self._write_back.wait(last)
        self._written_step = self.step

    def _forget(self) -> None:
        self._evictions.settle(self._write_back.wait)
        with self._lock:
            for known in self._alive.values():
                if (batch := known()) is not None:
                    batch.is_dropped = True
            self._alive = {}
        with self._beside():
            self.memory.erase_all()
        self._servers_have_rows = True  # rows that this worker did not write

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
