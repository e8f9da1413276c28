"""Lookups of a worker: from ids to keys to rows in as few messages as possible, and the gradients of a step."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.kernels.merge import sum_by_key
from torchfleet.tables.settings.policy import AdmissionEntry
from torchfleet.worker.client.shard import Floats, Keys
from torchfleet.worker.lookup.bags import Bags
from torchfleet.worker.lookup.batch_rows import Batch, BatchRows, Index, Lookup, PooledLookup
from torchfleet.worker.lookup.foresight import (
    Foresight,
    is_no_padding,
    keys_of,
    num_samples,
    stamp_of,
    tensors_of,
    values_of_slot,
)
from torchfleet.worker.lookup.sources import Embedding, Source

Item = TypeVar("Item")


class Engine:
    """All lookups of one worker. Each training thread has its own current batch."""

    def __init__(
        self,
        source: Source,
        embeddings: Mapping[str, Sequence[Embedding]],
        entries: Mapping[str, AdmissionEntry] | None = None,
    ) -> None:
        """`embeddings`: by table. `entries`: of the tables that keep shows, clicks or slots."""
        self._source, self._embeddings, self._entries = source, dict(embeddings), dict(entries or {})
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
        # A dataset's iterator says None if it would have to wait.
        ready = getattr(iterator, "ready", lambda: next(iterator, None))
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
        tensors = dict(tensors_of(inputs, "call"))
        num = num_samples(inputs, tensors.values())
        with self._count:  # several threads count
            self.num_samples += num
        current = self._current()
        if (
            current is None
            or current.is_entered
            or not any(tensor.untyped_storage().data_ptr() in current.pointers for tensor in tensors.values())
        ):
            current = self._own.batch = Batch(tensors, self._expect(tensors))
        else:
            current.tensors.update(tensors)
        current.is_entered = True

    def lookup(
        self, table: str, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None, create: bool
    ) -> torch.Tensor:
        """One row per id: shape (*ids.shape, dim)."""
        rows, index = self._find(table, [ids], padding_idx, create)
        if create and table in self._entries:
            num_samples = len(ids) if ids.dim() else 1
            self._note_shows(table, rows, index, np.arange(len(index) + 1), num_samples, by_slot=False)
        out: torch.Tensor = Lookup.apply(weight, rows, index)  # type: ignore[no-untyped-call]
        return out.view(*ids.shape, rows.dim).to(ids.device)

    def pooled(
        self,
        table: str,
        weight: torch.Tensor,
        slots: Sequence[torch.Tensor],
        bags: Bags,
        padding_idx: int | None,
        create: bool,
    ) -> torch.Tensor:
        """One row per sample and slot, the sum or mean of its bag: shape (samples, slots, dim). `slots`: their ids."""
        rows, index = self._find(table, slots, padding_idx, create)
        if create and table in self._entries:
            num_samples = (len(bags.offsets) - 1) // bags.num_slots
            self._note_shows(table, rows, index, bags.offsets, num_samples, by_slot=True)
        out: torch.Tensor = PooledLookup.apply(weight, rows, index, bags)  # type: ignore[no-untyped-call]
        return out.to(slots[0].device)

    def take_gradients(self) -> tuple[dict[str, tuple[Keys, Floats]], dict[str, list[float]]]:
        """Gradients of all lookups since the last call, summed per key, and how fresh their rows were."""
        pending: dict[str, list[BatchRows]] = {}
        for table, rows in self._pending():
            pending.setdefault(table, []).append(rows)
        gradients, versions = {}, {}
        for table, batches in pending.items():
            found = [gradient for rows in batches if (gradient := rows.gradients()) is not None]
            if found:
                gradients[table] = self._put_together(table, found)
                known = [rows.versions for rows in batches if rows.versions]  # none where no row was pulled
                versions[table] = [min(seen) for seen in zip(*known, strict=True)]
            for rows in batches:  # a later backward through the same graph starts anew
                rows.drop_gradients()
        self._pending().clear()
        self._own.batch = None
        return gradients, versions

    def drop_gradients(self) -> None:
        for _, rows in self._pending():
            rows.drop_gradients()
        self._pending().clear()

    def _put_together(self, table: str, gradients: list[tuple[Keys, Floats]]) -> tuple[Keys, Floats]:
        """Gradients of several batches; the server sums those that come with a slot, which is no amount."""
        if len(gradients) == 1:
            return gradients[0]
        keys, grads = map(np.concatenate, zip(*gradients, strict=True))
        return (keys, grads) if table in self._entries else sum_by_key(keys, grads)

    def _note_shows(
        self, table: str, rows: BatchRows, index: Index, offsets: Any, num_samples: int, by_slot: bool
    ) -> None:
        """Which keys were shown and clicked, by the slots of this batch that the table's entry names."""
        entry, batch = self._entries[table], self._current()
        assert batch is not None
        shows, clicks = (
            values_of_slot(batch.tensors, name, num_samples, table) if name else np.zeros(num_samples, np.float32)
            for name in (entry.show, entry.click)
        )
        rows.note_shows(index, np.asarray(offsets, np.int64), by_slot, shows, clicks)

    def _foresee(self, item: Any) -> Batch | None:
        if item is _END or item is None:
            return None
        tensors = dict(tensors_of(item, "batch"))
        batch = Batch(tensors, self._expect(tensors))
        if self._source.pulls_ahead and batch.rows:
            self._send(batch)
        return batch

    def _expect(self, tensors: dict[str, torch.Tensor]) -> dict[str, BatchRows]:
        expected = {}
        for table, (keys, stamp) in self.foresight.keys(tensors).items():
            expected[table] = self._new_rows(table)
            expected[table].expect(keys, stamp)
        return expected

    def _send(self, batch: Batch) -> None:
        """One message per server, or two where some tables create rows and others do not."""
        keys: dict[bool, dict[str, Keys]] = {}
        for table, rows in batch.rows.items():
            create = torch.is_grad_enabled() and any(embedding.training for embedding in self._embeddings[table])
            keys.setdefault(create, {})[table] = rows.keys
        batch.under_way = [self._source.pull(wanted, create) for create, wanted in keys.items()]

    def _find(
        self, table: str, slots: Sequence[torch.Tensor], padding_idx: int | None, create: bool
    ) -> tuple[BatchRows, Index]:
        """(the table's rows, the place of every id among them, or -1 for padding); ids of one slot after another.

        Rows that were not foreseen are pulled now.
        """
        for ids in slots:
            if ids.is_floating_point():
                raise TypeError(f"table '{table}' expects integer ids, found {ids.dtype}")
        self.num_lookups += 1
        batch = self._received()
        rows = batch.rows.get(table)
        if rows is None:
            rows = batch.rows[table] = self._new_rows(table)
        known = rows.known_index(stamp_of(slots)) if padding_idx is None else None
        if known is not None:
            return rows, known
        keys = keys_of(slots)
        is_real = None if padding_idx is None else is_no_padding(keys, padding_idx)
        real_keys = keys if is_real is None else keys[is_real]
        index, missing = rows.find(real_keys)
        if missing is not None:
            pulled = self._source.pull({table: missing}, create).result()
            rows.append(missing, pulled.rows[table], pulled.versions[table])
            index, _ = rows.find(real_keys)
            self.foresight.learn(batch.tensors, table, slots, padding_idx)
        return rows, index if is_real is None else _with_padding(index, is_real)

    def _received(self) -> Batch:
        """The current batch, with the rows that were foreseen."""
        batch = self._current()
        if batch is None:
            batch = self._own.batch = Batch({}, {})
        if batch.is_pulled:
            return batch
        if not batch.under_way:
            self._send(batch)
        batch.receive()
        return batch

    def _new_rows(self, table: str) -> BatchRows:
        pending = self._pending()  # of the thread that looks up, whichever thread runs backward
        return BatchRows(self._embeddings[table][0].dim, lambda rows: pending.append((table, rows)))

    def _current(self) -> Batch | None:
        return getattr(self._own, "batch", None)

    def _pending(self) -> list[tuple[str, BatchRows]]:
        if not hasattr(self._own, "pending"):
            self._own.pending = []
        pending: list[tuple[str, BatchRows]] = self._own.pending
        return pending


def _with_padding(index: Index, is_real: npt.NDArray[np.bool_]) -> Index:
    """The index of the ids that are no padding → of all ids, -1 for padding."""
    out = np.full(len(is_real), -1, np.int32)
    out[is_real] = index
    return out


_END: Any = object()
