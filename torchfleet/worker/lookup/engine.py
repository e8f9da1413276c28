"""Lookups of a worker: from ids to keys to rows in as few messages as possible, and the gradients of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from torchfleet.tables.rows.keyrange import check_range
from torchfleet.tables.settings.policy import AdmissionEntry
from torchfleet.worker.client.shard import Floats, Keys
from torchfleet.worker.lookup.bags import Bags
from torchfleet.worker.lookup.batch_rows import BatchRows, Index, Lookup, PooledLookup, with_padding
from torchfleet.worker.lookup.current_batch import Batch, Thread
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
        self._own = Thread()
        self._count = threading.Lock()
        self.foresight = Foresight()
        self.num_lookups = 0
        self.num_samples = 0
        self.agreed: Callable[[Iterable[Any]], Iterable[Any]] = lambda loader: loader  # batches that all workers have
        self.on_training: Callable[[], None] | None = None  # called before a lookup for training

    def use(self, source: Source) -> None:
        """Rows come from somewhere else from now on."""
        self._source = source

    def prefetch(self, loader: Iterable[Item]) -> Iterator[Item]:
        """The loader's batches; while one is computed with, the rows of the next are on their way."""
        iterator = iter(self.agreed(loader))
        item = next(iterator, _END)
        batch = self._foresee(item)
        # A dataset's iterator says None if it would have to wait.
        ready = getattr(iterator, "ready", lambda: next(iterator, None))
        current = None
        try:
            while item is not _END:
                following = ready()
                next_batch = self._foresee(following)
                current = self._own.batch = batch
                yield item
                if current is not None and not current.is_entered:  # else its call has counted
                    self._count_samples(item)
                if following is None:  # nothing to look ahead to while the last one was in use
                    following = next(iterator, _END)
                    next_batch = self._foresee(following)
                item, batch = following, next_batch
        finally:  # of the loop, also where it is left early: its rows are not for a later one
            if self._own.batch is current:
                self._own.batch = None

    def follow(self, model: torch.nn.Module) -> list[RemovableHandle]:
        """From now on every call of this model is a batch: its lookups share one pull, and their rows.

        Removing what is returned ends it.
        """
        return [
            model.register_forward_pre_hook(lambda _, args, kwargs: self.enter([args, kwargs]), with_kwargs=True),
            # Called also when the forward pass has failed.
            model.register_forward_hook(lambda _, args, output: self._own.leave(), always_call=True),
        ]

    def enter(self, inputs: Any) -> None:
        """The model is called with these inputs: a new batch, unless prefetch brought it."""
        self._count_samples(inputs)
        current = self._own.batch
        if current is None or current.is_entered or not any(current.holds(tensor) for _, tensor in tensors_of(inputs)):
            tensors = dict(tensors_of(inputs, "call"))
            current = self._own.batch = Batch(tensors, self._expect(tensors))
        current.open(inputs)

    def lookup(
        self, table: str, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None, create: bool
    ) -> torch.Tensor:
        """One row per id: shape (*ids.shape, dim)."""
        rows, index = self._find(table, [ids], padding_idx, create)
        if create and table in self._entries:
            num_samples = len(ids) if ids.dim() else 1
            self._note_shows(table, rows, index, np.arange(len(index) + 1), num_samples, by_slot=False)
        out: torch.Tensor = Lookup.apply(weight, rows, index)  # type: ignore[no-untyped-call]
        return _beside(out.view(*ids.shape, rows.dim), weight, ids)

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
        return _beside(out, weight, slots[0])

    def take_gradients(self) -> tuple[dict[str, tuple[Keys, Floats]], dict[str, list[float]]]:
        """Gradients of all lookups since the last call, summed per key, and how fresh their rows were.

        The step of this thread is over: its rows are not used again.
        """
        taken = self._own.gradients(self._entries)
        self._own.end_step()
        return taken

    def drop_gradients(self) -> None:
        self._own.drop_gradients()

    def _note_shows(
        self, table: str, rows: BatchRows, index: Index, offsets: Any, num_samples: int, by_slot: bool
    ) -> None:
        """Which keys were shown and clicked, by the slots of this batch that the table's entry names."""
        entry, tensors = self._entries[table], self._own.tensors
        shows, clicks = (
            values_of_slot(tensors, name, num_samples, table) if name else np.zeros(num_samples, np.float32)
            for name in (entry.show, entry.click)
        )
        rows.note_shows(index, np.asarray(offsets, np.int64), by_slot, shows, clicks)

    def _count_samples(self, inputs: Any) -> None:
        num = num_samples(inputs)
        with self._count:  # several threads count
            self.num_samples += num

    def _foresee(self, item: Any) -> Batch | None:
        if item is _END or item is None:
            return None
        tensors = dict(tensors_of(item, "batch"))
        batch = Batch(tensors, self._expect(tensors))
        if self._source.pulls_ahead and batch.foreseen:
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
        has_grad = batch.has_grad if batch.is_entered else torch.is_grad_enabled()
        for table, rows in batch.foreseen.items():
            self._check_range(table, rows.keys)
            create = has_grad and any(embedding.training for embedding in self._embeddings[table])
            keys.setdefault(create, {})[table] = rows.keys
        batch.under_way = [(create, self._source.pull(wanted, create)) for create, wanted in keys.items()]

    def _find(
        self, table: str, slots: Sequence[torch.Tensor], padding_idx: int | None, create: bool
    ) -> tuple[BatchRows, Index]:
        """(the table's rows, the place of every id among them, or -1 for padding); ids of one slot after another.

        Rows that are not known, or no longer good, are pulled now.
        """
        for ids in slots:
            if ids.is_floating_point():
                raise TypeError(f"table '{table}' expects integer ids, found {ids.dtype}")
        self.num_lookups += 1
        if create and self.on_training is not None:
            self.on_training()
        self._receive()
        known = self._own.known(table, slots, create)
        for rows in known if padding_idx is None else []:
            if (index := rows.known_index(stamp_of(slots))) is not None:
                return rows, index
        keys = keys_of(slots)
        is_real = None if padding_idx is None else is_no_padding(keys, padding_idx)
        real_keys = keys if is_real is None else keys[is_real]
        for rows in known:
            index, missing = rows.find(real_keys)
            if missing is None:
                return rows, index if is_real is None else with_padding(index, is_real)
        rows = self._growing(table, create)
        if self._fill(table, rows, real_keys, known if create else [], create):
            self.foresight.learn(self._own.tensors, table, slots, padding_idx)
        index, _ = rows.find(real_keys)
        return rows, index if is_real is None else with_padding(index, is_real)

    def _fill(self, table: str, rows: BatchRows, keys: Keys, known: Sequence[BatchRows], create: bool) -> bool:
        """Have all these keys in `rows`: those that are known are copied, others pulled. Returns whether any were."""
        missing = rows.find(keys)[1]
        for others in known:
            missing = rows.copy_from(others, missing)
        if missing is None:
            return False
        self._check_range(table, missing)
        pulled = self._source.pull({table: missing}, create).result()
        rows.append(missing, pulled.rows[table], pulled.versions[table])
        return True

    def _check_range(self, table: str, keys: Keys) -> None:
        """Checked here, and not only on the servers: here it is known which modules ask."""
        embeddings = self._embeddings[table]
        size = embeddings[0].num_embeddings
        if size is not None:
            paths = " and ".join(f"'{embedding.path}'" for embedding in embeddings if embedding.path)
            check_range(keys, size, f"table '{table}' (module {paths})" if paths else f"table '{table}'")

    def _receive(self) -> None:
        """The rows that were foreseen for the current batch are there."""
        batch = self._own.batch
        if batch is not None and batch.foreseen:
            if not batch.under_way:
                self._send(batch)
            batch.receive()

    def _growing(self, table: str, create: bool) -> BatchRows:
        """Where a lookup puts the rows that it pulls."""
        rows = self._own.growing(table, create)
        if rows is None:
            rows = self._new_rows(table)
            self._own.keep(table, rows, create)
        return rows

    def _new_rows(self, table: str) -> BatchRows:
        pending = self._own.pending  # of the thread that looks up, whichever thread runs backward
        return BatchRows(self._embeddings[table][0].dim, lambda rows: pending.append((table, rows)))


def _beside(out: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A model on a GPU has its rows there, wherever the ids are; on the CPU, where the ids are."""
    return out if weight.is_cuda else out.to(ids.device)


_END: Any = object()
