"""Lines of a server's log: listening, loaded, joined, left, saved, stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from torchfleet.base.monitor.json_lines import json_line, log_format
from torchfleet.ps.tables.table import Table

_MOST_NAMES = 4


def speaker(index: int | None = None) -> Callable[[str], None]:
    """A function that prints a line to stderr, after the time of day and the server's name.

    With FLEET_LOG_FORMAT=json each line is a JSON object. `index`: the server's number, if there are several.
    """
    name = "server" if index is None else f"server {index}"
    is_json = log_format() == "json"

    def say(text: str) -> None:
        line = f"[{time.strftime('%H:%M:%S')}] {name}: {text}"
        print(json_line(text, "server", index or 0) if is_json else line, file=sys.stderr, flush=True)

    return say


def tables_text(tables: Iterable[Table]) -> str:
    """The number of tables, and the names and sizes of the first few."""
    named = []
    for table in tables:
        spec = table.spec
        ids = "any id" if not spec.has_size else f"{spec.size:,} ids"
        named.append(f"'{spec.name}' ({f'{spec.size:,} numbers' if spec.is_dense else f'{ids} x {spec.dim}'})")
    more = [f"{len(named) - _MOST_NAMES} more"] if len(named) > _MOST_NAMES else []
    return f"{len(named)} table{'s' * (len(named) != 1)}: {', '.join([*named[:_MOST_NAMES], *more])}"


def rows_text(tables: Iterable[Table]) -> str:
    """The number of rows in all sparse tables."""
    return f"{sum(table.num_rows for table in tables if not table.spec.is_dense):,} rows"
