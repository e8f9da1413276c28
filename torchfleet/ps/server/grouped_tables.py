"""Requests for many small tables: one call of a kernel for all of them (tables/table_group.py).

If a request must be answered table by table, these functions return None, and have changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.net.joined_arrays import DOUBLES, ENTRY, FLOATS, KEYS, JoinedArrays
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import BOUNDED, FEW_ARRAYS, GATHERED, MAX_JOINED, STATE, VERSIONS, Array
from torchfleet.ps.server.sections import Section
from torchfleet.ps.tables.table import Table
from torchfleet.ps.tables.table_group import GroupUpdate, TableGroup

MAX_SAMPLES = 1e15  # samples of one push: float64 adds such numbers exactly
_MOST_KNOWN = 64


@dataclass(slots=True)
class Grouped:
    """The tables of a request, in the order of its sections: those of one group, and the dense ones."""

    tables: list[Table]
    group: TableGroup
    places: npt.NDArray[np.int64]  # of the group's tables among the sections
    others: list[int]  # places of the dense tables

    def is_of(self, tables: Mapping[int, Table]) -> bool:
        """Whether the server still has these tables."""
        return all(tables.get(table.spec.number) is table for table in self.tables)


class GroupedTables:
    """Caches the Grouped of requests for several tables, by the numbers of these tables."""

    def __init__(self) -> None:
        self._known: dict[bytes, Grouped | None] = {}
        self._num_tables = 0

    def of(self, tables: Mapping[int, Table], numbers: npt.NDArray[np.uint32]) -> Grouped | None:
        """The tables with these numbers; None if they have no group, or a number is unknown or comes twice."""
        if len(tables) != self._num_tables or len(self._known) > _MOST_KNOWN:
            self._known.clear()
            self._num_tables = len(tables)
        key = numbers.tobytes()
        found = self._known.get(key)
        if found is None and key not in self._known:
            found = self._known[key] = _grouped([tables.get(number) for number in numbers.tolist()])
        return found if found is not None and found.is_of(tables) else None


def _grouped(tables: Sequence[Table | None]) -> Grouped | None:
    known = [table for table in tables if table is not None]
    if len(known) < len(tables) or len({id(table) for table in known}) < len(known):
        return None
    places = [i for i, table in enumerate(known) if not table.spec.is_dense]
    group = TableGroup.of([known[i] for i in places])
    others = [i for i, table in enumerate(known) if table.spec.is_dense]
    return None if group is None else Grouped(known, group, np.array(places, np.int64), others)


@dataclass(slots=True)
class GroupSection:
    """The sections of a push for the tables of a group. It was checked when it was made."""

    table: Table  # the first of these tables
    update: GroupUpdate
    pulled_at: list[float]  # by table; NaN: unknown
    tables: Sequence[Table]
    arrays: JoinedArrays  # owns the memory that `update` reads

    def check(self) -> None:
        """As Section.check."""

    def apply(self) -> None:
        """As Section.apply."""
        for table, pulled_at in zip(self.tables, self.pulled_at, strict=True):
            if math.isfinite(pulled_at):
                table.staleness.note(int(table.step - min(max(pulled_at, 0.0), float(table.step))))
        self.update.apply()

    def staleness(self) -> int:
        """As Section.staleness. Callers use it for dense tables only, and no table of a group is dense."""
        return 0


AnySection = Section | GroupSection


def pull_grouped(
    known: GroupedTables, tables: Mapping[int, Table], arrays: JoinedArrays, flags: int
) -> JoinedArrays | None:
    """The reply to a pull; None unless all tables form one group and all rows exist."""
    entries = arrays.entries
    if flags & (STATE | BOUNDED) or (entries["code"] != KEYS).any() or (entries["columns"] != 1).any():
        return None
    found = known.of(tables, entries["number"])
    if found is None or found.others:
        return None
    made = np.zeros(len(entries) + bool(flags & VERSIONS), ENTRY)
    own = made[: len(entries)]
    own["number"], own["code"], own["columns"], own["rows"] = (
        entries["number"], FLOATS, found.group.dims, entries["rows"],
    )  # fmt: skip
    if flags & VERSIONS:
        made[-1] = 0, KEYS, 1, len(entries)
    reply = JoinedArrays.room_for(made)
    if reply.words.nbytes > MAX_JOINED or len(made) <= FEW_ARRAYS:
        return None
    counts = entries["rows"].astype(np.int64)
    if not found.group.read(_address(arrays), arrays.starts, counts, reply.floats, reply.starts):
        return None
    if flags & VERSIONS:
        reply.words[reply.starts[-2] :] = [table.step for table in found.tables]
    return reply


def push_grouped(known: GroupedTables, tables: Mapping[int, Table], request: Request) -> list[AnySection] | None:
    """The sections of a push: the dense tables, then one GroupSection for all others. None unless all rows exist."""
    arrays = request.message.arrays
    if not isinstance(arrays, JoinedArrays):
        return None
    num = (len(arrays) - 1) // 2
    has_settings = bool(request.message.flags & (GATHERED | BOUNDED))
    entries = arrays.entries
    keys, grads = entries[1 : 1 + 2 * num : 2], entries[2 : 2 + 2 * num : 2]
    if len(arrays) != 1 + 2 * num + has_settings or (keys["number"] != grads["number"]).any():
        return None
    found = known.of(tables, keys["number"])
    heads = arrays[0].data
    if found is None or not _fit(found, entries[0], keys, grads) or len(heads) != num:
        return None
    numbers = heads.tolist()
    if any(len(line) > 2 and not 0 <= line[2] <= MAX_SAMPLES for line in numbers):
        return None
    rates = [None if math.isnan(line[0]) else line[0] for line in numbers]
    places, sections = found.places, list[AnySection]()
    for i in found.others:
        sections.append(_section(found.tables[i], arrays[1 + 2 * i : 3 + 2 * i], numbers[i], rates[i]))
    starts, counts = arrays.starts, keys["rows"][places].astype(np.int64)
    own = [rates[i] for i in places.tolist()]
    update = found.group.checked(_address(arrays), starts[1 + 2 * places], starts[2 + 2 * places], counts, own)
    if update is None:
        return None
    pulled_at = [numbers[i][1] if len(numbers[i]) > 1 else math.nan for i in places.tolist()]
    first = found.group.tables[0]
    return [*sections, GroupSection(first, update, pulled_at, found.group.tables, arrays)]


def _fit(found: Grouped, heads: Any, keys: npt.NDArray[Any], grads: npt.NDArray[Any]) -> bool:
    """Whether the arrays have the dtypes and shapes of a push to these tables."""
    places = found.places
    return bool(
        heads["code"] == DOUBLES
        and 1 <= heads["columns"] <= 3
        and (keys["code"] == KEYS).all()
        and (keys["columns"] == 1).all()
        and (grads["code"] == FLOATS).all()
        and (grads["columns"][places] == found.group.dims).all()
        and (grads["rows"][places] == keys["rows"][places]).all()
    )


def _section(table: Table, pair: Sequence[Array], line: list[float], rate: float | None) -> Section:
    pulled_at = line[1] if len(line) > 1 and math.isfinite(line[1]) else None
    keys, grads = (array.data for array in pair)
    return Section(table, keys.reshape(-1), grads, rate, pulled_at, line[2] if len(line) > 2 else None)


def _address(arrays: JoinedArrays) -> int:
    return int(arrays.words.__array_interface__["data"][0])
