"""When a server shrinks tables by itself: whenever the clock enters another period of `every_hours`."""

from __future__ import annotations

from collections.abc import Iterable

from torchfleet.ps.tables.table import Table

HOUR = 3600


class Schedule:
    """The last period that each table has seen. A table's first period is no reason to shrink it."""

    def __init__(self) -> None:
        self._periods: dict[int, int] = {}  # by table

    def export(self) -> dict[int, int]:
        """As plain values."""
        return dict(self._periods)

    def restore(self, kept: dict[int, int]) -> None:
        """What `export` gave."""
        self._periods = dict(kept)

    def is_news(self, tables: Iterable[Table], now: int) -> bool:
        """Whether `note` would have anything to note."""
        every = ((table.spec.number, table.spec.shrink.every_hours) for table in tables)
        return any(
            hours is not None and self._periods.get(number) != int(now // (hours * HOUR)) for number, hours in every
        )

    def note(self, tables: Iterable[Table], now: int) -> list[Table]:
        """It is `now`: returns the tables that are to be shrunk."""
        due = []
        for table in tables:
            every = table.spec.shrink.every_hours
            if every is None:
                continue
            period = int(now // (every * HOUR))
            if period > self._periods.get(table.spec.number, period):
                due.append(table)
            self._periods[table.spec.number] = period
        return due
