"""Tables of one shape on this process's device that a model looks up and updates together: one launch of each kernel.

Updates of a group are always joined. Lookups are joined if one call, of a SparseEmbeddingCollection, has the ids of
several tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.table_group import TableGroup, shape_of
from torchfleet.ps.worker.lookup.device_lookups import RowsOnDevice, joined_gradients, shaped


class Asked(NamedTuple):
    """A lookup of one table of a group."""

    rows: RowsOnDevice
    ids: torch.Tensor
    padding: int | None
    create: bool  # missing ids get rows
    trains: bool  # the rows get gradients

    @property
    def is_alone(self) -> bool:
        """Whether it cannot be joined: the host decides which ids get rows."""
        return self.create and isinstance(self.rows.table, DeviceTable) and self.rows.table.has_entry


class JoinedRows:
    """A group of tables, and the gradients of their rows since the last step."""

    def __init__(self, members: Sequence[RowsOnDevice]) -> None:
        tables = [member.table for member in members if isinstance(member.table, DeviceTable)]
        assert len(tables) == len(members)
        self.members, self.tables = list(members), TableGroup(tables)
        self._numbers = {table.name: number for number, table in enumerate(tables)}
        self._anchor = torch.zeros((), device=self.tables.device, requires_grad=True)

    def step(self, lr: float | torch.Tensor, factor: float | torch.Tensor) -> None:
        """As RowsOnDevice.step, of each table."""
        pending = [member.take() for member in self.members]
        counts = [sum(len(slots) for slots, _ in own) for own in pending]
        slots, grads = joined_gradients([pair for own in pending for pair in own], self.tables, factor)
        self.tables.push(counts, slots, grads, lr)

    def lookup(self, asked: Sequence[Asked]) -> list[torch.Tensor]:
        """As RowsOnDevice.lookup of each, in their order. A table may occur several times; each of its lookups is in
        another launch.
        """
        found: dict[int, torch.Tensor] = {}
        for places in _rounds(asked):
            some = [asked[place] for place in places]
            found.update(zip(places, self._look_up(some), strict=True))
        return [found[place] for place in range(len(asked))]

    def _look_up(self, asked: Sequence[Asked]) -> Sequence[torch.Tensor]:
        """Look up different tables, with the same `create` and `trains`."""
        first = asked[0]
        if len(asked) == 1:
            return [first.rows.lookup(first.ids, first.padding, first.create, first.trains)]
        if first.create:
            for each in asked:
                each.rows.looked_up.append(each.ids)
        if not (first.trains and torch.is_grad_enabled()):
            return [values for values, _ in self.find(asked)]
        found: Sequence[torch.Tensor] = _JoinedLookup.apply(self._anchor, self, asked)  # type: ignore[no-untyped-call]
        return found

    def find(self, asked: Sequence[Asked]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(values, slots) of each lookup."""
        parts = [(self._numbers[each.rows.table.name], each.ids, each.padding) for each in asked]
        found = self.tables.find_and_gather(parts, asked[0].create)
        return [
            (shaped(values, (*each.ids.shape, self.tables.dim)), slots)
            for each, (slots, values) in zip(asked, found, strict=True)
        ]


class _JoinedLookup(torch.autograd.Function):
    """Values of rows, one output per table; backward leaves the gradients in each table's RowsOnDevice."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, group: JoinedRows, asked: Sequence[Asked]) -> tuple[torch.Tensor, ...]:
        found = group.find(asked)
        ctx.rows, ctx.slots = [each.rows for each in asked], [slots for _, slots in found]
        ctx.set_materialize_grads(False)  # a table that the loss does not use gets no update of its rows
        return tuple(values for values, _ in found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        for rows, slots, grad in zip(ctx.rows, ctx.slots, grads, strict=True):
            if grad is not None:
                rows.add(slots, grad)
        return None, None, None


def _rounds(asked: Sequence[Asked]) -> Iterator[list[int]]:
    """Yield the places of lookups that are made together, each table at most once. One with `is_alone` is by itself."""
    rounds: dict[Hashable, list[int]] = {}
    times: dict[str, int] = {}
    for place, each in enumerate(asked):
        name = each.rows.table.name
        number = times[name] = times.get(name, 0) + 1
        alone = place if each.is_alone else None
        rounds.setdefault((number, each.create, each.trains, alone), []).append(place)
    yield from rounds.values()


def joined(rows: Mapping[str, RowsOnDevice], trained_by: Mapping[str, Hashable]) -> list[JoinedRows]:
    """Groups of tables with the same shape and, by `trained_by`, the same param group. A table without such a partner,
    or on several ranks, is in no group.
    """
    groups: dict[Hashable, list[RowsOnDevice]] = {}
    for name, own in rows.items():
        if isinstance(own.table, DeviceTable):
            groups.setdefault((shape_of(own.table), trained_by[name]), []).append(own)
    return [JoinedRows(members) for members in groups.values() if len(members) > 1]
