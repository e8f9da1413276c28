"""A worker's lookups: from ids to keys to rows in as few messages as possible, and the gradients of a step."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchfleet.base.errors import WrongIds
from torchfleet.ps.worker.batch.bags import Bags
from torchfleet.ps.worker.batch.batch_tensors import WHOLE, is_no_padding, keys_of, stamp_of, values_of_slot
from torchfleet.ps.worker.batch.recipe import Replay
from torchfleet.ps.worker.batch.recorder import ROWS
from torchfleet.ps.worker.cache.cached_batch import CachedBatch
from torchfleet.ps.worker.cache.cached_batch import pooled as pooled_rows
from torchfleet.ps.worker.cache.cached_update import CachedUpdate
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.batch_rows import BatchRows, Index, with_padding
from torchfleet.ps.worker.lookup.current_batch import Batch
from torchfleet.ps.worker.lookup.grouped_rows import GroupedRows
from torchfleet.ps.worker.lookup.looking_ahead import LookingAhead
from torchfleet.ps.worker.lookup.row_functions import Lookup, pooled
from torchfleet.ps.worker.lookup.thread_state import ThreadState


class Engine(LookingAhead):
    """All lookups of one worker."""

    def lookup(
        self, table: str, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None, create: bool
    ) -> torch.Tensor:
        """One row per id: shape (*ids.shape, dim)."""
        own = self._own
        batch = own.batch
        if create and batch is not None and own.recorder is None and (place := batch.grouped.get(table)) is not None:
            group, number, outputs = place
            if group.is_for(number, weight, ids):
                return self._of_group(own, batch, group, number, outputs, ids)
        if create and table in self.caches:
            cached, at = self._find_cached(table, [ids], padding_idx)
            return self._given(cached.lookup(weight, at).view(*ids.shape, cached.dim), weight, ids)
        rows, index = self._find(table, [ids], padding_idx, create)
        if create:
            self._own.note_lookup(table, rows, index)
        elif torch.is_grad_enabled():
            self._own.predicted.add(table)
        if create and table in self._entries:
            num_samples = len(ids) if ids.dim() else 1
            self._note_shows(table, rows, index, np.arange(len(index) + 1), num_samples, by_slot=False)
        looked_up: torch.Tensor = Lookup.apply(weight, rows, index)  # type: ignore[no-untyped-call]
        return self._given(looked_up.view(*ids.shape, rows.dim), weight, ids)

    def _of_group(
        self,
        own: ThreadState,
        batch: Batch,
        group: GroupedRows,
        number: int,
        outputs: list[torch.Tensor],
        ids: torch.Tensor,
    ) -> torch.Tensor:
        """`lookup` for training of predicted ids, together with those of other tables."""
        self.num_lookups += 1
        if self.on_training is not None:
            self.on_training()
        if not outputs:
            if batch.is_awaited:
                self._receive()
            own.note_group(group)
            outputs += group.looked_up()
        group.is_used[number] = 1
        if group.is_apart:
            rows = group.rows[number]
            rows.note_used(rows.expected_index)
        for guess in batch.guesses.get(group.tables[number], ()):
            guess.is_right = True
        out = outputs[number]
        if out.shape[:-1] != ids.shape:
            out = out.view(*ids.shape, group.dim)
            self._suffixes[group.tables[number]] = tuple(ids.shape[1:])
        return out

    def pooled(
        self,
        table: str,
        weight: torch.Tensor,
        slots: Sequence[torch.Tensor],
        bags: Bags,
        padding_idx: int | None,
        create: bool,
    ) -> torch.Tensor:
        """One row per sample and slot, pooled over its bag: shape (samples, slots, dim). `slots`: the ids of each."""
        if create and table in self.caches:
            cached, at = self._find_cached(table, slots, padding_idx)
            found = pooled_rows(cached.lookup(weight, at), at, bags)
            return self._given(found, weight, slots[0])
        rows, index = self._find(table, slots, padding_idx, create)
        if create:
            self._own.note_lookup(table, rows, index)
        elif torch.is_grad_enabled():
            self._own.predicted.add(table)
        if create and table in self._entries:
            num_samples = (len(bags.offsets) - 1) // bags.num_slots
            self._note_shows(table, rows, index, bags.offsets, num_samples, by_slot=True)
        return self._given(pooled(weight, rows, index, bags), weight, slots[0])

    def take_gradients(self, tables: Collection[str]) -> tuple[dict[str, tuple[Keys, Floats]], dict[str, list[float]]]:
        """Gradients of all lookups in these tables since the last call, summed per key, and the versions of their rows.

        Ends this thread's step for these tables: their rows are not used again. Their gradients add up with those of
        later steps until `drop_gradients`.
        """
        own = self._own
        without_row = self._without_row(tables) if own.predicted else {}
        taken = own.gradients(tables, self._entries)
        for table, absent in without_row.items():
            keys, gradients = taken[0][table]  # a doubtful id waits for the step
            is_there = ~np.isin(keys, absent)
            taken[0][table] = keys[is_there], gradients[is_there]
        own.check_unspent(taken[0])
        if unmoved := own.without_gradient(tables):
            self._source.create_rows(unmoved)
        own.end_step(tables)
        own.carry(taken[0], self._entries)
        self.unforeseen_cost.step_made()
        if self._is_recording and self.num_lookups != self._num_called:
            self.end_recording()  # parts of the model are called: perhaps no call of the whole model ends it
        return taken

    def _without_row(self, tables: Collection[str]) -> Mapping[str, Keys]:
        """By table: ids that predictions alone have looked up in this step, and that have no row. Their gradients are
        dropped: the values that predictions read, zeros, are not those that the gradients would act on.
        """
        own = self._own
        own.predicted.difference_update(tables)
        doubtful = own.doubtful(tables)
        return self._source.without_row(doubtful) if doubtful else {}

    def take_cached(self, tables: Mapping[str, Any], rates: Mapping[str, float]) -> list[CachedUpdate]:
        """One update for each of these tables that has a cache, by the gradients of all lookups since the last call.
        To be called before `take_gradients`, which ends the step.
        """
        found = []
        for table in tables:
            if table in self.caches:
                if table in self._own.predicted:
                    self._train_in_cache(table)
                if self._own.cached.joined(table) is not None:
                    self._own.check_unspent([table])
                    self._own.spend([table])
                found.append(CachedUpdate(self.caches[table], self._own.cached.take(table), rates[table]))
        return found

    def _train_in_cache(self, table: str) -> None:
        """Bring the rows that predictions have looked up in a table with a cache into the cache, and their gradients to
        those that wait for the step. Gradients of ids without a row are dropped.
        """
        own, cache = self._own, self.caches[table]
        trained = [keys_of([ids]) for batch in own.cached.known(table) for ids, _ in batch.ids]  # have their rows here
        absent = self._without_row([table]).get(table, np.empty(0, np.uint64))
        found = own.take_apart(table)
        if found is None:
            return
        keys, gradients = found
        is_there = ~np.isin(keys, np.setdiff1d(absent, np.concatenate(trained)) if trained else absent)
        if is_there.any():
            rows = cache.prepare([(torch.from_numpy(keys[is_there].view(np.int64)), None)])
            own.cached.keep(table, rows)
            cache.wait_for(rows)
            index = rows.index_of([rows.ids[0][0]], None)
            assert index is not None
            rows.add(index, torch.from_numpy(gradients[is_there]).to(index.device))

    def end_step(self) -> None:
        """Drop this thread's rows and gradients."""
        self._own.end_step(self._embeddings)
        self._own.drop_gradients(self._embeddings)

    def drop_gradients(self, tables: Collection[str]) -> None:
        self._own.drop_gradients(tables)

    def _note_shows(
        self, table: str, rows: BatchRows, index: Index, offsets: Any, num_samples: int, by_slot: bool
    ) -> None:
        """Record the shows and clicks of keys, from the slots of this batch that the table's entry names."""
        entry, tensors = self._entries[table], self._own.tensors
        shows, clicks = (
            values_of_slot(tensors, name, num_samples, table) if name else np.zeros(num_samples, np.float32)
            for name in (entry.show, entry.click)
        )
        rows.note_shows(index, np.asarray(offsets, np.int64), by_slot, shows, clicks)

    def _given(self, out: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Move rows to the model's GPU if it has one, otherwise to the ids' device. Marks ids computed from them as
        unpredictable.
        """
        out = out if weight.is_cuda else out.to(ids.device)
        if self._own.recorder is not None:
            self._own.recorder.refuse(out, ROWS)
        return out

    def _find(
        self, table: str, slots: Sequence[torch.Tensor], padding_idx: int | None, create: bool
    ) -> tuple[BatchRows, Index]:
        """(the table's rows, the position of every id among them or -1 for padding); ids slot by slot.

        Pulls rows that are unknown or no longer valid.
        """
        self._begin_lookup(table, slots, create)
        if table in self.caches:  # a prediction reads the servers' rows
            self.caches[table].flush()
        self._receive()
        if self._own.batch is not None:
            self._own.batch.unused.discard(table)
            self._own.batch.looked_up.add(table)
        known = self._own.known(table, slots, create)
        for rows in known if padding_idx is None else []:
            if rows.stamp is not None and rows.stamp == stamp_of(slots):
                return rows, rows.expected_index
        keys, batch = keys_of(slots), self._own.batch
        if batch is not None:
            batch.note_lookup(table, slots, keys)
        is_real = None if padding_idx is None else is_no_padding(keys, padding_idx)
        real_keys = keys if is_real is None else keys[is_real]
        for rows in known:
            index, missing = rows.find(real_keys)
            if missing is None:
                return rows, index if is_real is None else with_padding(index, is_real)
        rows = self._growing(table, create)
        if self._fill(table, rows, real_keys, known if create else [], create):
            if batch is not None:
                batch.unforeseen.add(table)
            replay = Replay({}) if batch is None else batch.replay
            self.foresight.learn(replay, table, slots, padding_idx, self._own.recorder)
        index, _ = rows.find(real_keys)
        return rows, index if is_real is None else with_padding(index, is_real)

    def _begin_lookup(self, table: str, slots: Sequence[torch.Tensor], create: bool) -> None:
        for ids in slots:
            if ids.dtype not in WHOLE:
                raise WrongIds(f"table '{table}' expects ids that are whole numbers, found {ids.dtype}: use ids.long()")
        self.num_lookups += 1
        if create and self.on_training is not None:
            self.on_training()

    def _find_cached(
        self, table: str, slots: Sequence[torch.Tensor], padding_idx: int | None
    ) -> tuple[CachedBatch, torch.Tensor]:
        """As `_find`, for training with a table that has a cache."""
        self._begin_lookup(table, slots, create=True)
        batch, cache, own = self._own.batch, self.caches[table], self._own.cached
        if batch is not None and table in batch.guesses:
            batch.note_lookup(table, slots, keys_of(slots))
        if batch is not None and table in batch.cached:
            own.keep(table, batch.cached[table])
        for rows in own.known(table):
            cache.wait_for(rows)
            index = rows.index_of(slots, padding_idx)
            if index is not None:
                own.note_lookup(table, rows, index)
                return rows, index
        began = time.monotonic()
        rows = cache.prepare([(ids, padding_idx) for ids in slots])
        own.keep(table, rows)
        if batch is not None:
            batch.unforeseen.add(table)
            batch.cached.setdefault(table, rows)
        replay = Replay({}) if batch is None else batch.replay
        self.foresight.learn(replay, table, slots, padding_idx, self._own.recorder)
        cache.wait_for(rows)
        self.unforeseen_cost.waited(time.monotonic() - began)
        index = rows.index_of(slots, padding_idx)
        assert index is not None
        own.note_lookup(table, rows, index)
        return rows, index

    def _fill(self, table: str, rows: BatchRows, keys: Keys, known: Sequence[BatchRows], create: bool) -> bool:
        """Add all these keys to `rows`: copies the known ones and pulls the others. Returns whether any were pulled."""
        missing = rows.find(keys)[1]
        for others in known:
            missing = rows.copy_from(others, missing)
        if missing is None:
            return False
        self._check_range(table, missing)
        began = time.monotonic()
        pulled = self._source.pull({table: missing}, create).result()
        self.unforeseen_cost.waited(time.monotonic() - began)
        rows.append(missing, pulled.rows[table], pulled.versions[table])
        return True

    def _growing(self, table: str, create: bool) -> BatchRows:
        """The rows to which a lookup adds those that it pulls."""
        rows = self._own.growing(table, create)
        if rows is None:
            rows = self._new_rows(table)
            rows.creates = create
            self._own.keep(table, rows, create)
        return rows
