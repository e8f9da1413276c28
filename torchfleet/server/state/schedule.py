"""When tables are shrunk by themselves: whenever the clock enters another stretch of `every_hours`."""

from __future__ import annotations

from collections.abc import Iterable

from torchfleet.tables.dense_table import DenseTable
from torchfleet.tables.sparse_table import SparseTable

HOUR = 3600


class Schedule:
    """Which stretch each table was last seen in. The first that a table sees is no reason to shrink it."""

    def __init__(self) -> None:
        self._periods: dict[int, int] = {}  # by table

    def note(self, tables: Iterable[SparseTable | DenseTable], now: int) -> list[SparseTable]:
        """It is `now`: returns the tables that are to be shrunk."""
        due = []
        for table in tables:
            every = None if isinstance(table, DenseTable) else table.spec.shrink.every_hours
            if every is None or isinstance(table, DenseTable):
                continue
            period = int(now // (every * HOUR))
            if period > self._periods.get(table.spec.number, period):
                due.append(table)
            self._periods[table.spec.number] = period
        return due
