"""Compares two saved models: what only one of them has, and the differences in what both have."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.byte_words import to_numbers
from torchfleet.ps.checkpoint.manifest import Parameter, Table, read_manifest
from torchfleet.ps.checkpoint.matching import Difference, Rows, Show, compare_elements, match
from torchfleet.ps.checkpoint.part_reader import read_dense, read_part
from torchfleet.ps.tables.rows.memory import physical_bytes
from torchfleet.ps.tables.settings.policy import BLOCK_BYTES

_SETTINGS = [field for field in Table.__struct_fields__ if field not in ("name", "rows", "parameters")]

Settings = dict[str, tuple[Any, Any]]  # of the settings that differ: A's and B's


class TableDifference(msgspec.Struct):
    """The differences of a table that both models have."""

    settings: Settings
    rows: Difference | None = None  # None for a dense table, or if dim differs
    candidates: Difference | None = None
    is_sketch_equal: bool = True

    @property
    def is_none(self) -> bool:
        found = [difference for difference in (self.rows, self.candidates) if difference is not None]
        return not self.settings and self.is_sketch_equal and all(difference.is_none for difference in found)


class Comparison(msgspec.Struct):
    """The differences of two models. Names are those of tables and of dense parameters."""

    only_in_a: list[str]
    only_in_b: list[str]
    tables: dict[str, TableDifference]
    parameters: dict[str, Difference]
    shapes: dict[str, tuple[list[int], list[int]]]  # parameters whose shape in A differs from that in B
    types: dict[str, tuple[str, str]] = {}  # parameters whose type in A differs from that in B

    @property
    def is_equal(self) -> bool:
        found: list[TableDifference | Difference] = [*self.tables.values(), *self.parameters.values()]
        return not (self.only_in_a or self.only_in_b or self.shapes or self.types) and all(
            difference.is_none for difference in found
        )


class Model:
    """A saved model, with a cache of the last dense table read."""

    def __init__(self, dirname: str) -> None:
        self.storage = Storage(dirname)
        self.manifest = read_manifest(self.storage)
        self.tables = {table.name: table for table in self.manifest.tables}
        self.parameters: dict[str, tuple[Table, Parameter]] = {}
        for table in self.manifest.tables:
            if table.is_dense:
                layout = table.parameters or [Parameter(table.name, [table.size], 0)]
                self.parameters.update({parameter.name: (table, parameter) for parameter in layout})
        self._block: tuple[str, npt.NDArray[np.float32]] | None = None

    def parameter(self, name: str) -> npt.NDArray[np.float32]:
        """One row of values, and one for each kind of state."""
        table, parameter = self.parameters[name]
        if self._block is None or self._block[0] != table.name:
            self._block = table.name, read_dense(self.storage, self.manifest, table)
        return self._block[1][:, parameter.start : parameter.start + parameter.size]

    def rows(self, table: str, of_candidates: bool = False) -> Rows:
        return Rows(self.storage, self.manifest, table, of_candidates)

    def sketch(self, table: str) -> npt.NDArray[np.uint8]:
        """All blocks of the window's counters. If two servers held a block, each counter has the larger value."""
        found = np.zeros((self.tables[table].spec().entry.num_blocks, BLOCK_BYTES), np.uint8)
        for part in self.manifest.links()[-1].parts_of(table, "sketch"):
            blocks = read_part(self.storage, self.manifest.save, part)["blocks"]
            place = found[part.start : part.start + len(blocks)]
            if place.shape != blocks.shape:
                raise CheckpointError(f"{part.file}: {len(blocks)} blocks from {part.start} on are not in '{table}'")
            np.maximum(place, blocks, out=place)
        return found


def compare(a: str, b: str, max_bytes: int | None = None, show: Show = lambda text: None) -> Comparison:
    """Compare the models in two folders: chains or single saves, by any numbers of servers. `show` receives the
    progress.

    Memory: the rows of A, for one table at a time, up to `max_bytes` (default: half of the machine's memory): if the
    rows need more, both models are read several times. Numbers, times and `extra` of the saves are not compared.
    """
    first, second = Model(a), Model(b)
    budget = physical_bytes() // 2 if max_bytes is None else max_bytes
    if budget < 1:
        raise CheckpointError(f"max_bytes must be positive, found {max_bytes}")
    names = [{*model.tables, *model.parameters} for model in (first, second)]
    made = Comparison(sorted(names[0] - names[1]), sorted(names[1] - names[0]), {}, {}, {})
    for name in first.tables:
        if name in second.tables:
            made.tables[name] = _compare_tables(first, second, name, budget, show)
    for name in first.parameters:
        if name in second.parameters:
            one, other = first.parameters[name][1], second.parameters[name][1]
            if one.shape != other.shape:
                made.shapes[name] = one.shape, other.shape
            elif one.dtype != other.dtype:
                made.types[name] = one.dtype, other.dtype
            else:
                compare_values = compare_elements if one.dtype == "float32" else partial(_compare_words, one)
                made.parameters[name] = compare_values(first.parameter(name), second.parameter(name))
    return made


def _compare_words(parameter: Parameter, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> Difference:
    """Compare tensors that are kept as bytes, bit by bit; NaN is infinitely far from other values."""
    kind = parameter.dtype, parameter.shape, parameter.name
    x, y = to_numbers(a[0], *kind), to_numbers(b[0], *kind)
    differs = (x.view(np.uint8) != y.view(np.uint8)).reshape(len(x), -1).any(axis=1)
    changed = int(differs.sum())
    found = Difference(equal=len(x) - changed, changed=changed, others={})
    if changed:
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        apart = np.where(differs, np.abs(x.astype(wide) - y.astype(wide)), 0.0)
        apart[np.isnan(apart)] = np.inf
        found.largest, found.largest_at, found.mean = float(apart.max()), int(apart.argmax()), float(apart.mean())
    return found


def _compare_tables(a: Model, b: Model, name: str, max_bytes: int, show: Show) -> TableDifference:
    tables = a.tables[name], b.tables[name]
    pairs = {field: (getattr(tables[0], field), getattr(tables[1], field)) for field in _SETTINGS}
    found = TableDifference({field: pair for field, pair in pairs.items() if pair[0] != pair[1]})
    if any(table.is_dense for table in tables) or tables[0].dim != tables[1].dim:
        return found

    def show_table(text: str) -> None:
        show(f"{name}: {text}")

    rows = a.rows(name), b.rows(name)
    if rows[0].names != rows[1].names:
        found.settings["statistics"] = rows[0].names, rows[1].names
    found.rows = match(*rows, max_bytes, show_table)
    found.candidates = match(a.rows(name, True), b.rows(name, True), max_bytes, show_table)
    found.is_sketch_equal = bool(np.array_equal(a.sketch(name), b.sketch(name)))
    return found
