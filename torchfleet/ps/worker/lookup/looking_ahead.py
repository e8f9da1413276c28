"""A worker's batches: each thread's current batch, its predicted lookups, and the pulls in flight."""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from torchfleet.base.errors import ModelError
from torchfleet.base.job_hook import JobHook
from torchfleet.ps.tables.rows.keyrange import check_range
from torchfleet.ps.tables.settings.policy import AdmissionEntry
from torchfleet.ps.worker.batch.batch_tensors import num_samples, tensors_of
from torchfleet.ps.worker.batch.columns import Blocks
from torchfleet.ps.worker.batch.foresight import Foresight, Guess, Way
from torchfleet.ps.worker.batch.recipe import Replay
from torchfleet.ps.worker.batch.recorder import Recorder, hold_compiler, let_compiler_go
from torchfleet.ps.worker.batch.unforeseen_cost import UnforeseenCost
from torchfleet.ps.worker.cache.cached_batch import CachedBatch
from torchfleet.ps.worker.cache.row_cache import RowCache
from torchfleet.ps.worker.client.shard import Keys
from torchfleet.ps.worker.lookup.batch_rows import BatchRows
from torchfleet.ps.worker.lookup.column_groups import ColumnGroups
from torchfleet.ps.worker.lookup.current_batch import Batch
from torchfleet.ps.worker.lookup.grouped_rows import GroupedRows, groups_of
from torchfleet.ps.worker.lookup.sources import Embedding, Source
from torchfleet.ps.worker.lookup.thread_state import ThreadState
from torchfleet.ps.worker.lookup.transformed import not_plain, transforming

Item = TypeVar("Item")
_BATCHES_AHEAD = 4  # of a worker with a cache: rows come while several batches are trained
_MOST_AHEAD = 8  # if the caches have room: taken four at a time, which a cache prepares with the calls of one


class LookingAhead:
    """The part of an Engine that predicts lookups of batches. Each thread has its own current batch."""

    def __init__(
        self,
        source: Source,
        embeddings: Mapping[str, Sequence[Embedding]],
        entries: Mapping[str, AdmissionEntry] | None = None,
        caches: Mapping[str, RowCache] | None = None,
    ) -> None:
        """`embeddings`: by table. `entries`: of the tables that keep shows, clicks or slots. `caches`: of the tables
        whose rows are trained in a cache of this worker.
        """
        self._source, self._embeddings, self._entries = source, dict(embeddings), dict(entries or {})
        self.caches = dict(caches or {})
        # for tables whose lookups may be grouped with those of other tables: the table's one layer
        self._groupable = {
            table: layers[0]
            for table, layers in self._embeddings.items()
            if len(layers) == 1 and table not in self._entries and table not in self.caches
        }
        self._columns = ColumnGroups((), {})
        self._suffixes: dict[str, tuple[int, ...]] = {}  # by table: how its ids were shaped, behind the first dimension
        self._own = ThreadState(self.caches, self._train_in_cache) if self.caches else ThreadState()
        self._count = threading.Lock()
        self.foresight = Foresight()
        self.unforeseen_cost = UnforeseenCost()
        self.num_lookups = 0
        self.num_samples = 0
        self.agreed: Callable[[Iterable[Any]], Iterable[Any]] = lambda loader: loader  # batches that all workers have
        self._records = True
        self._followed: torch.nn.Module | None = None
        self._is_recording = False  # the next call is recorded, and not compiled: a recorder sees single functions
        self._num_called = 0  # lookups until the last call of the whole model ended
        self.on_training: Callable[[], None] | None = None  # called before a lookup for training
        self.on_first_call: Callable[[Sequence[Any], Mapping[str, Any]], None] | None = None  # with the model's inputs

    def _train_in_cache(self, table: str) -> None:
        """Move the gradients that predictions have left for a table with a cache to the cache's rows."""
        raise NotImplementedError

    @property
    def thread_state(self) -> ThreadState:
        """The calling thread's state."""
        return self._own

    def use(self, source: Source) -> None:
        """Take rows from another source from now on."""
        self._source = source

    def prefetch(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield the loader's batches, and pull the rows of the next ones while the current one is in use."""
        iterator = iter(self.agreed(loader))
        # A dataset's iterator yields None if it would have to wait.
        ready = getattr(iterator, "ready", lambda: next(iterator, None))
        given = getattr(iterator, "given", lambda: None)  # of hybrid mode: the others learn which batch is the last
        ahead: deque[tuple[Any, Batch | None]] = deque()
        current = None
        try:
            while True:
                if not ahead:  # nothing could be prefetched while the last batch was in use
                    item = next(iterator, _END)
                    ahead.append((item, self._foresee(item)))
                item, batch = ahead.popleft()
                if item is _END:
                    return
                given()
                if self.caches and batch is not None and not batch.cached:  # its ids could not be predicted then
                    batch = self._foresee(item)
                wanted = self._num_ahead(len(ahead))
                with self._cached_together():
                    while len(ahead) < wanted and (following := ready()) is not None:
                        ahead.append((following, self._foresee(following)))
                current = self._own.batch = batch
                yield item
                if current is not None and not current.is_entered:  # otherwise its call has counted
                    self._count_samples(item, tensors_of(item))
        finally:  # also if the loop is left early: its rows must not serve a later loop
            if self._own.batch is current:
                self._own.batch = None

    def _num_ahead(self, num: int) -> int:
        """How many batches `prefetch` takes from its loader early, when it has `num`."""
        if not self.caches:
            return 1
        is_due = num <= _MOST_AHEAD - _BATCHES_AHEAD
        return _MOST_AHEAD if is_due and all(cache.has_room for cache in self.caches.values()) else _BATCHES_AHEAD

    def _cached_together(self) -> contextlib.AbstractContextManager[None]:
        first = next(iter(self.caches.values()), None)  # all have the same thread
        return contextlib.nullcontext() if first is None else first.together()

    def follow(self, model: torch.nn.Module, records: bool = True) -> list[RemovableHandle]:
        """Treat every call of this model as a batch: its lookups share one pull, and their rows.

        Removing the returned handles ends it. `records`: record some calls, to predict ids that are computed in them.
        """
        self._records, self._followed = records, model
        enter = torch.compiler.disable(self.enter)  # type: ignore[no-untyped-call]
        leave = torch.compiler.disable(self._leave)  # type: ignore[no-untyped-call]
        self._plan_recording()
        return [
            model.register_forward_pre_hook(JobHook(enter), with_kwargs=True),
            model.register_forward_hook(JobHook(leave), always_call=True),  # also if the forward pass has failed
        ]

    def enter(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a call of the model with these inputs: a new batch, unless it was prefetched."""
        if what := transforming():
            raise ModelError(not_plain("", what))
        if self.on_first_call is not None:
            note, self.on_first_call = self.on_first_call, None
            note(args, kwargs)
        inputs = [args, kwargs]
        tensors = tensors_of(inputs, "call")
        self._count_samples(inputs, tensors)
        self._own.begin_call()
        current = self._own.batch
        if current is None or current.is_entered or not any(map(current.holds, tensors.values())):
            current = self._own.batch = self._expect(tensors)
        elif not self.foresight.ways or current.is_lacking:
            self.foresight.note_call(current.tensors, tensors)
        current.open(tensors)
        if self._own.recorder is not None:  # left by a call that was interrupted
            self._own.end_recording()
        if self._is_recording:
            self._own.recorder = Recorder(current.tensors)
            self._own.recorder.begin()

    def unforeseen(self) -> list[dict[str, str]]:
        """Tables whose ids are not predicted: the modules that look them up, the reason, and a remedy."""
        return [
            {"module": self._paths(table), "table": table, "why": reason.why, "what_to_do": reason.what_to_do}
            for table, reason in list(self.foresight.reasons.items())
        ]

    def _leave(self, model: torch.nn.Module, args: Sequence[Any], output: Any) -> None:
        """End the model's call, also if it has failed."""
        if self._own.recorder is not None:
            self._own.end_recording()
        batch = self._own.batch
        if batch is not None and batch.is_open:
            if batch.groups:
                batch.guess_unused()
            self.foresight.end_call(itertools.chain(*batch.guesses.values()), batch.unforeseen, batch.unused)
        self._own.leave()
        self._plan_recording()

    def end_recording(self) -> None:
        """Do not record the next call."""
        if self._is_recording:
            self._is_recording = False
            let_compiler_go(self)

    def _plan_recording(self) -> None:
        """Decide whether to record the next call."""
        self._num_called = self.num_lookups
        if self._is_recording:
            self.end_recording()
        # If no optimizer has imported the compiler, this process does not train: not worth an import that takes a
        # second.
        if self._records and "torch._dynamo" in sys.modules and self.foresight.wants_recording():
            self._is_recording = True
            hold_compiler(self)

    def _count_samples(self, inputs: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Count samples for training. Evaluation runs without gradients, or with the model in eval mode."""
        if not torch.is_grad_enabled() or (self._followed is not None and not self._followed.training):
            return
        num = num_samples(inputs, tensors.values())
        with self._count:  # several threads count
            self.num_samples += num

    def _foresee(self, item: Any) -> Batch | None:
        if item is _END or item is None:
            return None
        tensors = tensors_of(item, "batch")
        tensors |= self.foresight.in_call(tensors)
        batch = self._expect(tensors)
        batch.is_lacking = self.foresight.lacks(tensors)
        if self._source.pulls_ahead and batch.is_awaited:
            self._send(batch)
        return batch

    def _expect(self, tensors: dict[str, torch.Tensor]) -> Batch:
        """A batch with these tensors and its predicted lookups."""
        replay, foreseen, guesses = Replay(tensors), dict[str, BatchRows](), dict[str, list[Guess]]()
        begun: dict[Any, BatchRows] = {}  # tables with the same ids share their keys
        cached: dict[str, CachedBatch] = {}
        blocks = Blocks(replay)
        batch = Batch(tensors, replay, foreseen, guesses)
        batch.cached = cached
        ways = self._put_columns(batch, blocks) if len(self.foresight.ways) > 1 else None
        predicted = self.foresight.keys(replay, ways, blocks)
        if len(predicted) > 1 and torch.is_grad_enabled():
            for group in list(groups_of(predicted, self._groupable, self._new_rows, self._own.pending)):
                self._put_group(batch, group)
                for table in group.tables:
                    del predicted[table]
        for table, expected in predicted.items():
            if table in self.caches and self._trains(table):
                cached[table] = self.caches[table].prepare(expected.tensors)
                guesses |= {table: expected.guesses} if expected.guesses else {}
                continue
            rows, size = self._new_rows(table), self._embeddings[table][0].num_embeddings
            if (others := begun.setdefault(expected.origin, rows)) is rows:
                rows.expect(*expected.stamped)
            else:
                rows.expect_as(others)
            found = expected.guesses
            if found and size is not None and (rows.keys >= np.uint64(size)).any():
                continue  # a wrong guess is no error; an actual lookup of these ids will raise one
            foreseen[table] = rows
            if found:
                guesses[table] = found
        batch.unused.update(foreseen)
        batch.is_awaited = bool(batch.groups or foreseen)
        return batch

    def _put_columns(self, batch: Batch, blocks: Blocks) -> tuple[Way, ...]:
        """Put the groups of columns into a batch, if it has them; returns the ways that are left."""
        ways = self.foresight.ways
        if self._columns.ways is not ways:
            self._columns = ColumnGroups(ways, self._groupable)
        groups = self._columns.of(blocks, self._new_rows, self._own.pending) if torch.is_grad_enabled() else None
        for group in groups or ():
            self._put_group(batch, group)
        return ways if groups is None else self._columns.others

    def _put_group(self, batch: Batch, group: GroupedRows) -> None:
        group.suffixes = [self._suffixes.get(table, ()) for table in group.tables]
        batch.put_group(group)

    def cached_ids(self, item: Any) -> dict[str, list[tuple[torch.Tensor, int | None]]]:
        """By table with a cache: the ids of a batch that will be looked up, as far as known, and their padding."""
        tensors = tensors_of(item, "batch")
        tensors |= self.foresight.in_call(tensors)
        found = self.foresight.keys(Replay(tensors))
        return {table: expected.tensors for table, expected in found.items() if table in self.caches}

    def padding_of(self, table: str) -> int | None:
        """The id that stands for padding in all lookups of a table."""
        return self._embeddings[table][0].padding_idx

    def _trains(self, table: str) -> bool:
        """Whether a lookup now is for training."""
        return torch.is_grad_enabled() and any(map(_is_training, self._embeddings[table]))

    def _send(self, batch: Batch) -> None:
        """Send one message per server, or two if some tables create rows and others do not."""
        keys: dict[bool, dict[str, Keys]] = {}
        has_grad = batch.has_grad if batch.is_entered else torch.is_grad_enabled()
        if not has_grad:
            batch.take_groups_apart()
        for group in batch.groups:  # their keys are checked
            keys.setdefault(True, {}).update(group.keys_by_table())
        for table, rows in batch.foreseen.items():
            if table not in batch.guesses:
                self._check_range(table, rows.keys)
            create = has_grad and any(map(_is_training, self._embeddings[table]))
            rows.creates = create
            keys.setdefault(create, {})[table] = rows.keys
        for create, wanted in keys.items():
            pull = self._source.pull(wanted, create, foreseen=True) if create else self._source.pull(wanted, create)
            batch.under_way.append((create, pull))

    def _receive(self) -> None:
        """Wait for the predicted rows of the current batch."""
        batch = self._own.batch
        if batch is not None and batch.is_awaited:
            if not batch.under_way:
                self._send(batch)
            batch.receive()

    def _check_range(self, table: str, keys: Keys) -> None:
        """Raise an error for keys beyond the table's size. Servers check too, but do not know the modules to name."""
        size = self._embeddings[table][0].num_embeddings
        if size is not None:
            paths = self._paths(table)
            check_range(keys, size, f"table '{table}' (module {paths})" if paths else f"table '{table}'")

    def _paths(self, table: str) -> str:
        return " and ".join(f"'{embedding.path}'" for embedding in self._embeddings[table] if embedding.path)

    def _new_rows(self, table: str) -> BatchRows:
        pending = self._own.pending  # of the thread that looks up, whichever thread runs backward
        return BatchRows(self._embeddings[table][0].dim, lambda rows: pending.append((table, rows)))


_END: Any = object()
_is_training = operator.attrgetter("training")
