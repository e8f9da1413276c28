"""A table for a terminal. Empty columns are left out, and on a narrow terminal the least important ones. Rows that do
not fit are folded into their minimum, median and maximum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from torchfleet.base.monitor.snapshot import RoleSnapshot
from torchfleet.base.printable import bare
from torchfleet.observe.watch import figures

_GAP = 2  # between columns
_FOLDS: dict[str, Callable[[list[float]], float]] = {"median": median, "min": min, "max": max}
_STATES = {"running": "green", "failed": "red bold", "starting": "yellow", "waiting": "yellow"}


@dataclass(frozen=True)
class Column:
    """`rank`: columns with a higher rank are left out first. `number`: the value to fold; None: nothing."""

    heading: str
    rank: int
    cell: Callable[[RoleSnapshot], str]
    number: Callable[[RoleSnapshot], float | None] | None = None
    shown: Callable[[float], str] = figures.count
    is_text: bool = False


def table(roles: Sequence[RoleSnapshot], columns: Sequence[Column], width: int, height: int) -> list[Text]:
    """At most `height` lines of at most `width` cells, the headings among them."""
    if not roles or height < 2:
        return []
    num = len(roles) if len(roles) < height else max(0, height - 1 - len(_FOLDS))
    shown, folded = roles[:num], roles[num:]
    rows = [[column.cell(role) for column in columns] for role in shown]
    styles = [_STATES.get(role.state, "") for role in shown]
    for i, (name, fold) in enumerate(list(_FOLDS.items())[: height - 1 - num] if folded else []):
        who = f"{folded[0].role}s {figures.ranges(list({role.index for role in folded}))} " if not i else ""
        rows.append([who + name, *(_folded(folded, column, fold) for column in columns[1:])])
        styles.append("dim")
    kept = _fitting(columns, rows, width)
    widths = [max(cell_len(columns[i].heading), *(cell_len(row[i]) for row in rows)) for i in kept]
    headings = [columns[i].heading for i in kept]
    lines = [_line(headings, [columns[i] for i in kept], widths, width, "bold dim")]
    lines += [
        _line([row[i] for i in kept], [columns[i] for i in kept], widths, width, style)
        for row, style in zip(rows, styles, strict=True)
    ]
    return lines


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the columns to show: those that are not empty, as long as they fit. The first is always shown."""
    kept = [i for i in range(len(columns)) if i == 0 or any(row[i] for row in rows)]
    needed = {i: max(cell_len(columns[i].heading), *(cell_len(row[i]) for row in rows)) for i in kept}
    while len(kept) > 1 and sum(needed[i] + _GAP for i in kept) - _GAP > width:
        worst = max(kept[1:], key=lambda i: columns[i].rank)
        rest = width - sum(needed[i] + _GAP for i in kept if i != worst)
        if columns[worst].is_text and rest >= cell_len(columns[worst].heading) + 6:
            break  # a text may be cut
        kept.remove(worst)
    return kept


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], width: int, style: str) -> Text:
    """Join the cells of a line. Names come from processes, so they are text, never markup."""
    text = Text(no_wrap=True, overflow="ellipsis", style="dim" if style == "dim" else "")
    for i, (cell, column, most) in enumerate(zip(cells, columns, widths, strict=True)):
        is_left = i == 0 or column.is_text
        own = style if style == "bold dim" or (i == 0 and style) else ""
        text.append(set_cell_size(cell, most) if is_left else cell.rjust(most), own)
        text.append(" " * _GAP)
    text.rstrip()
    return cropped(text, width)


def cropped(text: Text, width: int) -> Text:
    """One line that fits."""
    text.truncate(max(1, width), overflow="ellipsis")
    return text


def _folded(roles: Sequence[RoleSnapshot], column: Column, fold: Callable[[list[float]], float]) -> str:
    numbers = [number for role in roles if column.number is not None and (number := column.number(role)) is not None]
    return column.shown(fold(numbers)) if numbers else ""


def field_of(name: str, shown: Callable[[float], str]) -> dict[str, Any]:
    """The cell and the number of a column that is a field of the status."""

    def number(role: RoleSnapshot) -> float | None:
        found = role.status.get(name)
        return None if found is None else float(found)

    def cell(role: RoleSnapshot) -> str:
        found = number(role)
        return "" if found is None else shown(found)

    return {"cell": cell, "number": number, "shown": shown}


def metrics_of(role: RoleSnapshot) -> str:
    return "  ".join(f"{bare(name)} {figures.metric(value)}" for name, value in role.metrics.items())
