"""How long rows are valid: each thread's current batch, and the step it trains for.

Rows that were pulled for training are valid until the thread's next step, as long as something holds them: the model's
call, a prefetched batch, the autograd graph or pending gradients. Rows that were pulled for prediction are valid for
the model's call that asked for them. A lookup for prediction outside of a call pulls what it needs and keeps nothing:
the servers may have changed since any earlier lookup.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.kernels.merge import sum_by_key
from torchfleet.ps.worker.batch.recorder import Recorder
from torchfleet.ps.worker.cache.thread_batches import ThreadBatches
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.batch_rows import BatchRows, Index, doubtful_of, merged
from torchfleet.ps.worker.lookup.current_batch import Batch
from torchfleet.ps.worker.lookup.grouped_rows import GroupedRows
from torchfleet.ps.worker.lookup.row_functions import Lookup

Pending = tuple[str, BatchRows] | GroupedRows


class ThreadState(threading.local):
    """The calling thread's batch, and the rows and gradients of its step."""

    def __init__(
        self, caches: Collection[str] = (), train_in_cache: Callable[[str], None] = lambda table: None
    ) -> None:
        """`caches`: the tables with a cache. `train_in_cache` moves to the cache the gradients that predictions of one
        of them have left.
        """
        self._caches, self._train_in_cache = caches, train_in_cache
        self.batch: Batch | None = None
        self.recorder: Recorder | None = None  # of the model's call, if it is recorded
        self.pending: list[Pending] = []  # gradients that wait for the step
        # Pushed by a step, and not dropped since: as dense gradients do, they count in the next step, too. By table.
        self._carried: dict[str, tuple[Keys, Floats]] = {}
        self._spent: set[str] = set()  # tables whose pushed gradients cannot count again, and are not dropped yet
        self.cached = ThreadBatches()  # rows and gradients of tables with a cache
        self.predicted: set[str] = set()  # tables whose predictions may get gradients
        # Weak: a step may never come, and rows that no graph refers to get no gradient.
        self._step: dict[str, list[weakref.ref[BatchRows]]] = {}
        # for training, since the call began
        self._looked_up: dict[str, list[tuple[weakref.ref[BatchRows], Index]]] = {}
        self._groups: list[weakref.ref[GroupedRows]] = []  # of the step
        self._looked_up_groups: list[weakref.ref[GroupedRows]] = []  # since the call began

    def begin_call(self) -> None:
        """Begin a new call of the model."""
        self._looked_up.clear()
        self._looked_up_groups.clear()
        if self.cached.is_used:
            self.cached.begin_call()

    def note_lookup(self, table: str, rows: BatchRows, index: Index) -> None:
        """Record a lookup for training at these positions of the rows."""
        self._looked_up.setdefault(table, []).append((weakref.ref(rows), index))
        rows.note_used(index)

    def note_group(self, group: GroupedRows) -> None:
        """Record the first lookup for training in a group. The group itself notes which tables were looked up."""
        self._looked_up_groups.append(weakref.ref(group))

    def batch_rows(self, table: str, weight: torch.Tensor) -> torch.Tensor | None:
        """The distinct rows that were looked up for training, differentiable; None if no row was."""
        places: dict[int, tuple[BatchRows, list[Index]]] = {}
        for of_group in self._looked_up_groups:
            if (found := _in_group(of_group, table)) is not None and found[0].is_used[found[1]]:
                of_table = found[0].rows[found[1]]
                places[id(of_table)] = of_table, [of_table.expected_index]
        for reference, index in self._looked_up.get(table, []):
            if (rows := reference()) is not None:
                places.setdefault(id(rows), (rows, []))[1].append(index)
        parts, seen = [], np.empty(0, np.uint64)
        for rows, indices in places.values():
            index = np.unique(np.concatenate(indices))
            index = index[index >= 0]  # padding has no row
            index = index[~np.isin(rows.keys[index], seen)]
            seen = np.concatenate([seen, rows.keys[index]])
            parts.append(Lookup.apply(weight, rows, index))  # type: ignore[no-untyped-call]
        parts += self.cached.looked_up(table, weight)
        return torch.cat(parts) if parts else None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the current batch; empty outside of one."""
        return {} if self.batch is None else self.batch.tensors

    def end_recording(self) -> None:
        if self.recorder is not None:
            self.recorder.end()
            self.recorder = None

    def leave(self) -> None:
        """End the model's call: keep for the step what the call pulled for training, and drop the rest."""
        batch = self.batch
        if batch is None:  # a step was made inside the call
            return
        for (table, create), rows in batch.rows.items():
            if create:
                self._keep_for_step(table, rows)
        if batch.groups:
            self._groups = [there for there in self._groups if there() is not None]
            self._groups += map(weakref.ref, () if batch.is_awaited else batch.groups)
        batch.close()

    def carry(self, gradients: Mapping[str, tuple[Keys, Floats]], wide: Collection[str]) -> None:
        """Keep pushed gradients until they are dropped: those of the next backward pass add up with them.

        Not those of `wide` tables: shows and clicks behind them would be counted twice.
        """
        if wide:
            self.spend(table for table in gradients if table in wide)
            gradients = {table: own for table, own in gradients.items() if table not in wide}
        self._carried.update(gradients)

    def spend(self, tables: Iterable[str]) -> None:
        """Note that the gradients of these tables were applied, and cannot be applied again."""
        self._spent.update(tables)

    def check_unspent(self, tables: Iterable[str]) -> None:
        """Raise ModelError if gradients of these tables were applied in an earlier step, and not dropped since."""
        found = sorted(self._spent.intersection(tables)) if self._spent else []
        if found:
            raise ModelError(
                f"optimizer.step() a second time without zero_grad(): gradients of table '{found[0]}', which has a "
                "cache, or shows and clicks, do not add up over steps, as those of other parameters do. Call "
                "optimizer.zero_grad() after every step."
            )

    def _recall(self) -> None:
        """Make carried gradients pending ones, as copies: their push may still be under way."""
        carried, self._carried = self._carried, {}
        for table, (keys, grads) in carried.items():
            rows = BatchRows(grads.shape[1], lambda rows: None)
            rows.take_gradients(keys, grads.copy(), None, [])
            self.pending.insert(0, (table, rows))

    def gradient(self, table: str) -> torch.Tensor | None:
        """The pending gradient of a table, one row for each key. It is pushed as it is at the step."""
        if table in self._caches and table in self.predicted:
            self._train_in_cache(table)
        if self._carried:
            self._recall()
        if (cached := self.cached.joined(table)) is not None:
            return cached.whole_gradients()
        found = [rows for name, rows in self._apart() if name == table]
        if len(found) > 1:
            together = merged(found)
            self.drop_gradients([table])  # a later backward pass through the same graph starts from zero
            self.pending.append((table, together))
            found = [together]
        return torch.from_numpy(found[0].whole_gradients()) if found else None

    def put_gradient(self, table: str, gradient: torch.Tensor | None) -> None:
        """Replace the pending gradient, or with None drop it."""
        if gradient is None:
            if self.pending or self._carried or self._spent or self.cached.is_used:
                self.drop_gradients([table])
            return
        pending = self.gradient(table)
        if pending is None or pending.shape != gradient.shape:
            found = "nothing" if pending is None else f"a gradient of shape {tuple(pending.shape)}"
            raise ModelError(
                f"table '{table}': {found} is pending, and one of shape {tuple(gradient.shape)} was to take its "
                "place. Change the weight's .grad in place, or set it to None."
            )
        pending.copy_(gradient.detach())

    def gradients(
        self, tables: Collection[str], wide: Collection[str]
    ) -> tuple[dict[str, tuple[Keys, Floats]], dict[str, list[float]]]:
        """By table: (keys, gradients summed per key) that are pending, and the versions of their rows.

        `wide`: tables whose gradients are followed by show, click and slot.
        """
        pending: dict[str, list[BatchRows]] = {}
        gradients: dict[str, tuple[Keys, Floats]] = {}
        versions: dict[str, list[float]] = {}
        if self._carried:
            self._recall()
        if (groups := self._whole_groups(tables)) is not None:
            for group in groups:
                for table, own, at in group.gradients():
                    gradients[table], versions[table] = own, at
            return gradients, versions
        for table, rows in self._apart():
            if table in tables:
                pending.setdefault(table, []).append(rows)
        for table, batches in pending.items():
            found, seen = [], []
            for rows in batches:
                if (gradient := rows.gradients()) is not None:
                    found.append(gradient)
                if rows.versions:  # empty if no row was pulled
                    seen.append(rows.versions)
            if found:
                gradients[table] = found[0] if len(found) == 1 else _put_together(found, table in wide)
                if seen:
                    versions[table] = list(map(min, zip(*seen, strict=True)))
        return gradients, versions

    def take_apart(self, table: str) -> tuple[Keys, Floats] | None:
        """Take the gradients of rows that are not in a cache: (keys, gradients summed per key), or None."""
        found = self.gradients([table], ())[0].get(table)
        self._drop_apart([table])
        return found

    def doubtful(self, tables: Collection[str]) -> dict[str, Keys]:
        """By table: keys with pending gradients that only predictions have looked up, and read as zeros."""
        pending: dict[str, list[BatchRows]] = {}
        for table, rows in self._apart():
            if table in tables:
                pending.setdefault(table, []).append(rows)
        found = {table: doubtful_of(batches) for table, batches in pending.items()}
        return {table: keys for table, keys in found.items() if len(keys)}

    def without_gradient(self, tables: Collection[str]) -> dict[str, Keys]:
        """By table: foreseen keys that were looked up for training and have no gradient, though other rows have one."""
        found: dict[str, Keys] = {}
        for own in self.pending:
            if isinstance(own, tuple) and own[0] in tables and len(keys := own[1].without_gradient()):
                found[own[0]] = np.concatenate([found[own[0]], keys]) if own[0] in found else keys
        return found

    def drop_gradients(self, tables: Collection[str]) -> None:
        """Drop pending and carried gradients. A later backward pass through the same graph starts from zero."""
        if self._carried or self._spent:
            for table in tables:
                self._carried.pop(table, None)
                self._spent.discard(table)
        self._drop_pending(tables)

    def _drop_pending(self, tables: Collection[str]) -> None:
        if self.pending and (groups := self._whole_groups(tables)) is not None:
            for group in groups:
                group.drop_gradients()
            self.pending.clear()
        elif self.pending:
            self._drop_apart(tables)
        if self.cached.is_used:
            self.cached.drop_gradients(tables)

    def _drop_apart(self, tables: Collection[str]) -> None:
        kept: list[Pending] = []
        for table, rows in self._apart():
            if table in tables:
                rows.drop_gradients()
            else:
                kept.append((table, rows))
        self.pending[:] = kept

    def end_step(self, tables: Collection[str]) -> None:
        """Drop the rows of these tables, which are about to change, before the next step."""
        self._drop_pending(tables)
        if self._groups or self._looked_up_groups:
            self._end_groups(tables)
        if self._step or self._looked_up:
            for table in tables:
                self._step.pop(table, None)
                self._looked_up.pop(table, None)
        if self.cached.is_used:
            self.cached.end_step(tables)
        self.batch = None

    def _whole_groups(self, tables: Collection[str]) -> list[GroupedRows] | None:
        """The groups of all pending gradients, if all are of whole groups, whose tables are all in `tables` and in one
        group each; otherwise None.
        """
        found, num, seen = [], 0, set[str]()
        for group in self.pending:
            if not isinstance(group, GroupedRows) or group.is_apart:
                return None
            found.append(group)
            num += len(group.tables)
            seen.update(group.tables)
        return found if len(seen) == num and all(map(tables.__contains__, seen)) else None

    def _apart(self) -> list[tuple[str, BatchRows]]:
        """The pending gradients by table. From now on they are kept so, no longer by group."""
        found: list[tuple[str, BatchRows]] = []
        for own in self.pending:
            found += [own] if isinstance(own, tuple) else zip(own.tables, own.rows, strict=True)
        self.pending[:] = found
        return found

    def _end_groups(self, tables: Collection[str]) -> None:
        """End the step of all groups. The rows of a group's tables that are not in `tables` are kept table by table."""
        for groups in (self._groups, self._looked_up_groups):
            for group in [there for reference in groups if (there := reference()) is not None]:
                for number, table in enumerate(group.tables):
                    if table not in tables:
                        rows = group.rows[number]
                        if groups is self._groups:
                            self._keep_for_step(table, rows)
                        elif group.is_used[number]:
                            self.note_lookup(table, rows, rows.expected_index)
            groups.clear()

    def known(self, table: str, slots: Sequence[torch.Tensor], create: bool) -> list[BatchRows]:
        """Rows that a lookup may reuse: the batch's first, then those of earlier lookups of the step."""
        batch, found = self.batch, []
        if batch is not None and (create or batch.may_serve(table, slots)):
            for pulled_for_training in (True,) if create else (True, False):
                if (rows := batch.rows_of(table, pulled_for_training)) is not None:
                    found.append(rows)
        for of_group in reversed(self._groups) if create else ():
            if (place := _in_group(of_group, table)) is not None:
                found.append(place[0].rows[place[1]])
        for reference in reversed(self._step.get(table, [])) if create else ():
            if (rows := reference()) is not None:
                found.append(rows)
        return found

    def growing(self, table: str, create: bool) -> BatchRows | None:
        """The batch's rows, to which a lookup adds those that it pulled; None if it must start new ones."""
        batch = self.batch
        return batch.rows_of(table, create) if batch is not None and (batch.is_open or create) else None

    def keep(self, table: str, rows: BatchRows, create: bool) -> None:
        """Remember rows that were started for a lookup, if another lookup may use them."""
        batch = self.batch
        if batch is not None and (batch.is_open or (create and not batch.is_entered)):
            batch.rows[table, create] = rows
        elif create:
            self._keep_for_step(table, rows)

    def _keep_for_step(self, table: str, rows: BatchRows) -> None:
        rows.stamp = None  # the predicted ids may be freed from now on, and other ids may get their memory
        known = self._step.get(table)
        alive = [there for there in known if there() is not None] if known else []
        self._step[table] = [*alive, weakref.ref(rows)]


def _in_group(reference: weakref.ref[GroupedRows], table: str) -> tuple[GroupedRows, int] | None:
    """(the group, the table's number in it); None if the group is gone, or has no such table."""
    group = reference()
    number = None if group is None else group.number_of(table)
    return None if group is None or number is None else (group, number)


def _put_together(gradients: list[tuple[Keys, Floats]], is_wide: bool) -> tuple[Keys, Floats]:
    """Concatenate the gradients of several lookups or batches. Gradients with a slot, which must not be summed here,
    are summed by the server.
    """
    width = max(grads.shape[1] for _, grads in gradients)  # eval mode records no show, click and slot
    keys = np.concatenate([keys for keys, _ in gradients])
    grads = np.concatenate([np.pad(grads, ((0, 0), (0, width - grads.shape[1]))) for _, grads in gradients])
    return (keys, grads) if is_wide else sum_by_key(keys, grads)
