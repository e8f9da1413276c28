"""Tables of one width that a batch looks up once each: one pass finds their distinct keys, one function of autograd
gathers their rows, and one sums their gradients.

A model with many small tables spends its time on the calls of each table, not on its numbers. So a group is one object,
which makes a BatchRows for each table only when something asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from torchfleet.ps.kernels import lookup
from torchfleet.ps.kernels.rows import gather
from torchfleet.ps.kernels.table_groups import are_keys_at
from torchfleet.ps.worker.batch.batch_tensors import WHOLE, keys_of
from torchfleet.ps.worker.batch.foresight import Expected, Guess, Way
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.batch_rows import BatchRows
from torchfleet.ps.worker.lookup.distinct_parts import DistinctParts
from torchfleet.ps.worker.lookup.sources import Embedding

MOST_IDS = 8192  # of one table; with more ids, several threads find the distinct keys
NewRows = Callable[[str], BatchRows]


class GroupedRows:
    """The rows of several tables of one width, by their number in the group."""

    def __init__(
        self,
        ways: Sequence[Way],
        layers: Sequence[Embedding],
        parts: DistinctParts,
        new_rows: NewRows,
        pending: list[Any],
    ) -> None:
        """`ways`: one for each table. `pending`: the group is appended to it with its first gradients."""
        self.tables = [way.table for way in ways]
        self.weights = tuple([layer.weight for layer in layers])
        self.dim, self.parts = layers[0].dim, parts
        # by table: the shape of its ids behind the first dimension, if known. A view would add an autograd function.
        self.suffixes: Sequence[tuple[int, ...]] = [()] * len(self.tables)
        self.is_used = bytearray(len(self.tables))  # by table: whether the group has served its lookup
        self._ways, self._new_rows, self._pending = ways, new_rows, pending
        self._values: Floats | None = None
        self._versions: list[list[float]] = []
        self._sums: Floats | None = None  # gradients of all rows
        self._rows: list[BatchRows] | None = None

    @property
    def rows(self) -> list[BatchRows]:
        """The rows of each table. From the first access on they are kept apart, with gradients of their own."""
        if self._rows is None:
            self._rows = [self._apart(number) for number in range(len(self.tables))]
        return self._rows

    @property
    def is_apart(self) -> bool:
        return self._rows is not None

    def number_of(self, table: str) -> int | None:
        return self.tables.index(table) if table in self.tables else None

    def keys_by_table(self) -> Iterator[tuple[str, Keys]]:
        """(table, its distinct keys)."""
        keys = self.parts.keys
        for table, (start, stop) in zip(self.tables, pairwise(self.parts.starts), strict=True):
            yield table, keys[start:stop]

    def guesses(self, number: int) -> list[Guess]:
        """The guess of a table's ids, if they are computed; otherwise empty."""
        way = self._ways[number]
        return [Guess(way, self.parts.ids_of(number))] if way.recipe.is_computed else []

    def receive(self, values: Sequence[Floats], versions: list[list[float]]) -> None:
        """Take the rows of each table, in the order of its keys, and their versions."""
        self._values, self._versions = np.concatenate(values), versions
        for number, rows in enumerate(self._rows or ()):
            rows.values, rows.versions = values[number], versions[number]

    def is_for(self, number: int, weight: torch.Tensor, ids: torch.Tensor) -> bool:
        """Whether a lookup for training is one of exactly the predicted ids of this table, in their order."""
        if self.is_used[number] or self.weights[number] is not weight or not weight.requires_grad or not ids.is_cpu:
            return False
        first, end = self.parts.firsts[number], self.parts.firsts[number + 1]
        if ids.numel() != end - first:
            return False
        if ids.dtype is torch.int64 and ids.is_contiguous():
            return bool(are_keys_at(ids.data_ptr(), self.parts.ids, first, end))
        return ids.dtype in WHOLE and keys_of([ids]).tobytes() == self.parts.ids_of(number).tobytes()

    def looked_up(self) -> Sequence[torch.Tensor]:
        """By table: the rows of its ids, in their order, (ids, *suffix, dim). The graph holds this group: the result
        must not be stored in it, which would make a reference cycle.
        """
        found: Sequence[torch.Tensor] = _GroupedLookup.apply(self, *self.weights)  # type: ignore[no-untyped-call]
        return found

    def gathered(self) -> list[torch.Tensor]:
        """By table: the rows of its ids."""
        dim, index = self.dim, self.parts.index
        assert self._values is not None
        out = np.empty((len(index), dim), np.float32)
        gather(self._values.reshape(-1), dim, 0, index, out)
        suffix, counts = self.suffixes[0], self.parts.counts
        size = math.prod(suffix)
        if suffix and self.suffixes.count(suffix) == len(counts) and not any(num % size for num in counts):
            shaped = torch.from_numpy(out.reshape(-1, *suffix, dim))
            return _split(shaped, [num // size for num in counts])
        found = _split(torch.from_numpy(out), counts)
        for number, own in enumerate(self.suffixes):
            if own and not counts[number] % math.prod(own):
                found[number] = torch.from_numpy(found[number].numpy().reshape(-1, *own, dim))
        return found

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of the outputs; None for tables that have none."""
        if self._rows is not None or self._sums is not None or any(grad is None for grad in grads):
            self._add_each(grads)
            return
        dim, num = self.dim, self.parts.starts[-1]
        flat: Floats = _side_by_side(grads, dim).detach().numpy()  # type: ignore[arg-type]
        self._sums = np.full((num, dim), lookup.NOTHING, np.float32)
        touched = np.empty(num, np.bool_)
        lookup.add_rows(flat.reshape(-1), dim, dim, self.parts.index, self._sums.reshape(-1), touched)
        self._pending.append(self)

    def gradients(self) -> Iterator[tuple[str, tuple[Keys, Floats], list[float]]]:
        """(table, its keys and summed gradients, the versions of its rows), while the rows are not kept apart."""
        sums = self._sums
        assert sums is not None
        places = zip(self.keys_by_table(), pairwise(self.parts.starts), self._versions, strict=True)
        for (table, keys), (start, stop), versions in places:
            yield table, (keys, sums[start:stop]), versions

    def drop_gradients(self) -> None:
        """Drop the gradients, while the rows are not kept apart."""
        self._sums = None

    def _add_each(self, grads: Sequence[torch.Tensor | None]) -> None:
        for number, (rows, grad) in enumerate(zip(self.rows, grads, strict=True)):
            if grad is not None:
                rows.add(self.parts.own_of(number), grad.reshape(-1, rows.dim))

    def _apart(self, number: int) -> BatchRows:
        """The rows of a table by themselves, with the values and gradients that the group has for them."""
        parts, rows = self.parts, self._new_rows(self.tables[number])
        start, stop = parts.starts[number : number + 2]
        rows.expect_part(parts.keys[start:stop], parts.own_of(number), parts.ids_of(number), bool(self.is_used[number]))
        if self._values is not None:
            rows.values, rows.versions = self._values[start:stop], self._versions[number]
        if self._sums is not None:
            rows.take_gradients(rows.keys, self._sums[start:stop], None, rows.versions)
        return rows


def _split(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Split a tensor that only the caller holds. Each part may be changed in place, which torch refuses for views that
    a function of autograd returns.
    """
    return list(torch.unsafe_split_with_sizes(tensor, sizes))


def _side_by_side(grads: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The gradients of all tables, one after the other."""
    suffix = grads[0].shape[1:]
    for grad in grads:
        if grad.shape[1:] != suffix:
            return torch.cat([own.reshape(-1, dim) for own in grads])
    return torch.cat(list(grads))


def groups_of(
    expected: Mapping[str, Expected], groupable: Mapping[str, Embedding], new_rows: NewRows, pending: list[Any]
) -> Iterator[GroupedRows]:
    """The groups of a batch with these predicted lookups, with keys and without values.

    `groupable`: the layers of the tables that may be in a group. A group with an id beyond the size of its table is
    left out: its tables are looked up one by one, which finds the wrong id or prediction.
    """
    by_dim: dict[int, list[str]] = {}
    with torch._C.DisableTorchFunctionSubclass():  # the weights' properties are read
        for table, found in expected.items():
            layer = groupable.get(table)
            if layer is None or len(found.slots) > 1 or found.slots[0][0].padding_idx is not None:
                continue
            if may_train(layer):
                by_dim.setdefault(layer.dim, []).append(table)
    known: dict[Any, DistinctParts] = {}  # layers of several widths with the same ids share their keys
    for tables in by_dim.values():
        ids = [expected[table].keys for table in tables]
        if len(tables) == 1 or not 0 < min(map(len, ids)) <= max(map(len, ids)) <= MOST_IDS:
            continue
        layers = [groupable[table] for table in tables]
        sizes = tuple([layer.num_embeddings for layer in layers])
        ways = [expected[table].slots[0][0] for table in tables]
        origin = sizes, tuple([way.origin for way in ways])
        parts = known[origin] = known.get(origin) or DistinctParts.of(ids, sizes)
        if parts.are_below:
            yield GroupedRows(ways, layers, parts, new_rows, pending)


def may_train(layer: Embedding) -> bool:
    """Whether the lookups of a layer are for training, and may be part of a group."""
    weight = layer.weight
    return layer.training and weight.requires_grad and weight.is_cpu


class _GroupedLookup(torch.autograd.Function):
    """Values of rows, one output per table."""

    @staticmethod
    def forward(ctx: Any, group: GroupedRows, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.num = group, len(weights)
        ctx.set_materialize_grads(False)
        return tuple(group.gathered())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.group.add(grads)
        nothing: tuple[None, ...] = (None,) * (1 + ctx.num)
        return nothing
