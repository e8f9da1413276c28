"""The kinds of tables. A new one is a class in a file of its own (tables/table.py has its methods), and a line here."""

from __future__ import annotations

from torchfleet.ps.tables.dense_table import DenseTable
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.spec import KINDS, TableKind, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.tables.table import Table

KINDS["sparse"] = TableKind(SparseTable, has_size=False)
KINDS["array"] = TableKind(SparseTable, has_size=True)
KINDS["dense"] = TableKind(lambda spec, max_bytes, _: DenseTable(spec, max_bytes), has_size=True, is_dense=True)


def make_table(spec: TableSpec, max_bytes: int, clock: Clock) -> Table:
    """An empty table as it is described. Raises TableError if it could not have its memory."""
    table: Table = KINDS[spec.kind].make(spec, max_bytes, clock)
    return table
