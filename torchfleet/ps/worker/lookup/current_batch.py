"""One batch of a thread: its tensors, and the rows that were predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch

from torchfleet.ps.worker.batch.batch_tensors import Stamp, stamp_of
from torchfleet.ps.worker.batch.foresight import Guess
from torchfleet.ps.worker.batch.recipe import Replay
from torchfleet.ps.worker.cache.cached_batch import CachedBatch
from torchfleet.ps.worker.client.shard import Keys
from torchfleet.ps.worker.lookup.batch_rows import BatchRows
from torchfleet.ps.worker.lookup.grouped_rows import GroupedRows
from torchfleet.ps.worker.lookup.sources import PullAhead

# (group, number of the table in it, outputs of the group: filled by the first lookup)
GroupPlace = tuple[GroupedRows, int, list[torch.Tensor]]


class Batch:
    """One batch's tensors, by their place in it and in the model's call with it, and its rows.

    Predicted rows are pulled together, at the first lookup or before. `replay`: of its tensors.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        replay: Replay,
        foreseen: dict[str, BatchRows],
        guesses: dict[str, list[Guess]],
    ) -> None:
        self.tensors, self.replay, self.foreseen, self.guesses = tensors, replay, foreseen, guesses
        self.unforeseen: set[str] = set()  # tables with lookups of ids that were not predicted
        self.unused: set[str] = set()  # tables with predicted ids and no lookup; those of groups from `guess_unused` on
        self.looked_up: set[str] = set()  # tables, without those whose group has served their lookups
        self.rows: dict[tuple[str, bool], BatchRows] = {}  # by table and whether they were pulled for training
        self.under_way: list[tuple[bool, PullAhead]] = []
        self.cached: dict[str, CachedBatch] = {}  # by table, of tables with a cache
        self.groups: list[GroupedRows] = []
        self.grouped: dict[str, GroupPlace] = {}  # by table of a group
        self.is_awaited = False  # predicted rows have not arrived
        self.is_entered = False  # the model was called with it: another call is another batch
        self.is_open = False  # the model's call with it is running
        self.is_lacking = False  # more ids could be predicted if the form of the model's call were known
        self.has_grad = False  # it was called with gradients enabled
        self._own = set(map(id, tensors.values()))
        self._pointers: set[int] = set()
        self._served: set[tuple[str, Stamp]] = set()

    def note_lookup(self, table: str, slots: Sequence[torch.Tensor], keys: Keys) -> None:
        """Compare the guesses about this table with the actual lookup: the keys of all slots, slot by slot."""
        if table in self.grouped and table not in self.guesses:
            self._guess(table)
        start = 0
        for ids in slots if table in self.guesses else ():
            own = keys[start : start + ids.numel()]
            start += ids.numel()
            for guess in self.guesses[table]:
                guess.compare(own)

    def put_group(self, group: GroupedRows) -> None:
        """Add the predicted rows of tables that are looked up together."""
        self.groups.append(group)
        outputs: list[torch.Tensor] = []
        places = zip(repeat(group), range(len(group.tables)), repeat(outputs), strict=False)
        self.grouped.update(zip(group.tables, places, strict=True))

    def take_groups_apart(self) -> None:
        """Let the tables of all groups be looked up by themselves."""
        for group in self.groups:
            for table, rows in zip(group.tables, group.rows, strict=True):
                self.foreseen[table] = rows
                self._guess(table)
        self.groups, self.grouped = [], {}

    def guess_unused(self) -> None:
        """Add the guesses of tables that were not looked up in their group: the guesses of other tables were right."""
        for group in self.groups:
            if not all(group.is_used):
                for number, table in enumerate(group.tables):
                    if not group.is_used[number] and table not in self.looked_up:
                        self.unused.add(table)
                    if not group.is_used[number] and table not in self.guesses:
                        self._guess(table)

    def _guess(self, table: str) -> None:
        group, number, _ = self.grouped[table]
        if found := group.guesses(number):
            self.guesses[table] = found

    def rows_of(self, table: str, create: bool) -> BatchRows | None:
        """The rows of a table that have arrived; None if no row has."""
        rows = self.rows.get((table, create))
        if rows is None and create and table in self.grouped and not self.is_awaited:
            group, number, _ = self.grouped[table]
            rows = self.rows[table, True] = group.rows[number]
        return rows

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this is a tensor of the batch, or a view of one."""
        if id(tensor) in self._own:
            return True
        if not self._pointers:
            self._pointers = {own.untyped_storage().data_ptr() for own in self.tensors.values()}
        return tensor.untyped_storage().data_ptr() in self._pointers

    def open(self, inputs: dict[str, torch.Tensor]) -> None:
        """Begin the model's call with these inputs."""
        self.tensors.update(inputs)
        self.is_entered = self.is_open = True
        self.has_grad = torch.is_grad_enabled()

    def close(self) -> None:
        """End the model's call."""
        self.rows, self.foreseen, self.under_way, self.cached = {}, {}, [], {}
        self.groups, self.grouped = [], {}
        self.is_open = self.is_awaited = False

    def receive(self) -> None:
        """Wait for the pulls in flight, and take in their rows."""
        for create, pull in self.under_way:
            pulled = pull.result()
            for group in self.groups if create else ():
                rows, versions = pulled.rows, pulled.versions
                group.receive([rows[table] for table in group.tables], [versions[table] for table in group.tables])
            for table, rows_there in self.foreseen.items():
                if table in pulled.rows:
                    self.rows[table, create] = rows_there
                    rows_there.values, rows_there.versions = pulled.rows[table], pulled.versions[table]
        self.foreseen, self.under_way, self.is_awaited = {}, [], False

    def may_serve(self, table: str, slots: Sequence[torch.Tensor]) -> bool:
        """Whether the batch's rows are valid for a lookup for prediction: one within the model's call, or the first one
        of these ids in a prefetched batch.
        """
        if self.is_open:
            return True
        asked = table, stamp_of(slots)
        if self.is_entered or asked in self._served or not all(self.holds(ids) for ids in slots):
            return False
        self._served.add(asked)
        return True
