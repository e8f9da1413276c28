"""Lookups of a worker: from ids to rows in as few messages as can be, and the gradients of a step collected."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.kernels.merge import sum_by_key
from torchfleet.tables.settings.policy import AdmissionEntry
from torchfleet.worker.client.future import Pulled
from torchfleet.worker.client.shard import Floats, Keys
from torchfleet.worker.lookup.bags import Bags
from torchfleet.worker.lookup.batch_rows import BatchRows, Lookup, PooledLookup
from torchfleet.worker.lookup.embedding import SparseEmbedding
from torchfleet.worker.lookup.foresight import (
    Foresight,
    is_no_padding,
    joined,
    joined_stamps,
    num_samples,
    stamp,
    tensors,
    values_of_slot,
)

Item = TypeVar("Item")


class PullAhead(Protocol):
    """A pull that is under way."""

    def result(self) -> Pulled: ...


class Source(Protocol):
    """Where rows come from: the communicator of the mode."""

    pulls_ahead: bool  # rows may be asked for before the step before them has ended

    def pull(self, keys: Mapping[str, Keys], create: bool) -> PullAhead: ...


class Batch:
    """One batch's tensors and rows. What was foreseen is pulled in one go at the first lookup, or before."""

    def __init__(self, parts: dict[str, torch.Tensor], expected: dict[str, BatchRows]) -> None:
        self.parts, self.rows = parts, expected
        self.pointers = {tensor.untyped_storage().data_ptr() for tensor in parts.values()}
        self.under_way: list[PullAhead] = []
        self.is_pulled = not expected
        self.is_entered = False  # the model was called with it: another call is another batch


class Engine:
    """All lookups of one worker. Each training thread has its own current batch."""

    def __init__(
        self,
        source: Source,
        modules: Mapping[str, Sequence[SparseEmbedding]],
        entries: Mapping[str, AdmissionEntry] | None = None,
    ) -> None:
        """`entries`: of the tables that keep shows, clicks or slots."""
        self._source, self._modules, self._entries = source, dict(modules), dict(entries or {})
        self._own = threading.local()
        self._count = threading.Lock()
        self.foresight = Foresight()
        self.num_lookups = 0
        self.num_samples = 0

    def use(self, source: Source) -> None:
        """Rows come from somewhere else from now on."""
        self._source = source

    def prefetch(self, loader: Iterable[Item]) -> Iterator[Item]:
        """The loader's batches; while one is computed with, the rows of the next are on their way."""
        iterator = iter(loader)
        item = next(iterator, _END)
        batch = self._foresee(item)
        ready = getattr(
            iterator, "ready", lambda: next(iterator, None)
        )  # a dataset's says None if it would have to wait
        while item is not _END:
            following = ready()
            next_batch = self._foresee(following)
            self._own.batch = batch
            yield item
            if following is None:  # nothing to look ahead to while the last one was in use
                following = next(iterator, _END)
                next_batch = self._foresee(following)
            item, batch = following, next_batch

    def enter(self, inputs: Any) -> None:
        """The model is called with these inputs: a new batch, unless prefetch brought it."""
        parts = dict(tensors(inputs, "call"))
        num = num_samples(inputs, parts.values())
        with self._count:  # several threads count
            self.num_samples += num
        current = self._current()
        if (
            current is None
            or current.is_entered
            or not any(tensor.untyped_storage().data_ptr() in current.pointers for tensor in parts.values())
        ):
            current = self._own.batch = Batch(parts, self._expect(parts))
        else:
            current.parts.update(parts)
        current.is_entered = True

    def lookup(
        self, table: str, weight: torch.Tensor, ids: torch.Tensor, padding: int | None, create: bool
    ) -> torch.Tensor:
        """One row per id: shape (*ids.shape, dim)."""
        batch, index = self._index(table, [ids], padding, create)
        if create and table in self._entries:
            num_samples = len(ids) if ids.dim() else 1
            self._note_shows(table, batch, index, np.arange(len(index) + 1), num_samples, by_slot=False)
        out: torch.Tensor = Lookup.apply(weight, batch, index)  # type: ignore[no-untyped-call]
        return out.view(*ids.shape, batch.dim).to(ids.device)

    def pooled(
        self,
        table: str,
        weight: torch.Tensor,
        slots: Sequence[torch.Tensor],
        bags: Bags,
        padding: int | None,
        create: bool,
    ) -> torch.Tensor:
        """One row per sample and slot, the sum or mean of its bag: shape (samples, slots, dim)."""
        batch, index = self._index(table, slots, padding, create)
        if create and table in self._entries:
            num_samples = (len(bags.offsets) - 1) // bags.num_slots
            self._note_shows(table, batch, index, bags.offsets, num_samples, by_slot=True)
        out: torch.Tensor = PooledLookup.apply(weight, batch, index, bags)  # type: ignore[no-untyped-call]
        return out.to(slots[0].device)

    def take_gradients(self) -> tuple[dict[str, tuple[Keys, Floats]], dict[str, list[float]]]:
        """Gradients of all lookups since the last call, summed per key, and how fresh their rows were."""
        pending: dict[str, list[BatchRows]] = {}
        for table, batch in self._pending():
            pending.setdefault(table, []).append(batch)
        grads, versions = {}, {}
        for table, batches in pending.items():
            parts = [part for batch in batches if (part := batch.gradients()) is not None]
            if parts:
                grads[table] = self._put_together(table, parts)
                known = [batch.versions for batch in batches if batch.versions]  # none where no row was pulled
                versions[table] = [min(seen) for seen in zip(*known, strict=True)]
            for batch in batches:  # a later backward through the same graph starts anew
                batch.drop_gradients()
        self._pending().clear()
        self._own.batch = None
        return grads, versions

    def _put_together(self, table: str, parts: list[tuple[Keys, Floats]]) -> tuple[Keys, Floats]:
        """Gradients of several batches; the server sums those that come with a slot, which is no amount."""
        if len(parts) == 1:
            return parts[0]
        keys, grads = map(np.concatenate, zip(*parts, strict=True))
        return (keys, grads) if table in self._entries else sum_by_key(keys, grads)

    def _note_shows(
        self, table: str, rows: BatchRows, index: npt.NDArray[np.int32], offsets: Any, num_samples: int, by_slot: bool
    ) -> None:
        """Which keys were shown and clicked, by the slots of this batch that the table's entry names."""
        entry, batch = self._entries[table], self._current()
        assert batch is not None
        shows, clicks = (
            values_of_slot(batch.parts, name, num_samples, table) if name else np.zeros(num_samples, np.float32)
            for name in (entry.show, entry.click)
        )
        rows.note_shows(index, np.asarray(offsets, np.int64), by_slot, shows, clicks)

    def drop_gradients(self) -> None:
        for _, batch in self._pending():
            batch.drop_gradients()
        self._pending().clear()

    def _foresee(self, item: Any) -> Batch | None:
        if item is _END or item is None:
            return None
        parts = dict(tensors(item, "batch"))
        batch = Batch(parts, self._expect(parts))
        if self._source.pulls_ahead and batch.rows:
            self._send(batch)
        return batch

    def _expect(self, parts: dict[str, torch.Tensor]) -> dict[str, BatchRows]:
        expected = {}
        for table, (keys, origin) in self.foresight.keys(parts).items():
            expected[table] = self._new_rows(table)
            expected[table].expect(keys, origin)
        return expected

    def _send(self, batch: Batch) -> None:
        """One message per server, or two where some tables create rows and others do not."""
        wanted: dict[bool, dict[str, Keys]] = {}
        for table, rows in batch.rows.items():
            create = torch.is_grad_enabled() and any(module.training for module in self._modules[table])
            wanted.setdefault(create, {})[table] = rows.keys
        batch.under_way = [self._source.pull(keys, create) for create, keys in wanted.items()]

    def _index(
        self, table: str, slots: Sequence[torch.Tensor], padding: int | None, create: bool
    ) -> tuple[BatchRows, npt.NDArray[np.int32]]:
        """(the table's rows, the place of every id among them), for all slots one after another."""
        for ids in slots:
            if ids.is_floating_point():
                raise TypeError(f"table '{table}' expects integer ids, found {ids.dtype}")
        self.num_lookups += 1
        batch = self._current()
        if batch is None:
            batch = self._own.batch = Batch({}, {})
        self._receive(batch)
        rows = batch.rows.get(table)
        if rows is None:
            rows = batch.rows[table] = self._new_rows(table)
        origin = joined_stamps([stamp(ids) for ids in slots]) if padding is None else None
        known = rows.known_index(origin)
        if known is not None:
            return rows, known
        keys = joined(slots)
        real = None if padding is None else is_no_padding(keys, padding)
        wanted = keys if real is None else keys[real]
        index, foreseen = rows.index(wanted, lambda missing: self._pull_now(table, missing, create))
        if not foreseen:
            self.foresight.learn(batch.parts, table, slots, padding)
        if real is not None:
            every = np.full(len(keys), -1, np.int32)
            every[real] = index
            index = every
        return rows, index

    def _receive(self, batch: Batch) -> None:
        if batch.is_pulled:
            return
        if not batch.under_way:
            self._send(batch)
        for pull in batch.under_way:
            pulled = pull.result()
            for table, values in pulled.rows.items():
                batch.rows[table].values, batch.rows[table].versions = values, pulled.versions[table]
        batch.is_pulled = True

    def _pull_now(self, table: str, keys: Keys, create: bool) -> tuple[Floats, list[float]]:
        pulled = self._source.pull({table: keys}, create).result()
        return pulled.rows[table], pulled.versions[table]

    def _new_rows(self, table: str) -> BatchRows:
        pending = self._pending()  # of the thread that looks up, whichever thread runs backward
        return BatchRows(self._modules[table][0].dim, lambda rows: pending.append((table, rows)))

    def _current(self) -> Batch | None:
        return getattr(self._own, "batch", None)

    def _pending(self) -> list[tuple[str, BatchRows]]:
        if not hasattr(self._own, "pending"):
            self._own.pending = []
        pending: list[tuple[str, BatchRows]] = self._own.pending
        return pending


_END: Any = object()
