"""Prints tables, histograms and lists of keys as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.table import Table

from torchfleet.base.printable import bare, say
from torchfleet.ps.tables.summary import bin_limits

_BAR = 40  # characters
_TITLES = {
    "norm": "norm of the values",
    "score": "score (shows and clicks, decayed)",
    "unseen_days": "days since the row was last looked up",
    "age_days": "days since the row was made",
}


def print_table(headings: Sequence[str], lines: Sequence[Sequence[Any]], left: Sequence[str] = ()) -> None:
    """Columns are aligned to the right, those named in `left` to the left. Integers get commas."""
    shown = Table()
    for heading in headings:
        shown.add_column(heading, justify="left" if heading in left else "right")
    for line in lines:
        shown.add_row(*(f"{cell:,}" if isinstance(cell, int) else bare(str(cell)) for cell in line))
    console = Console(markup=False, emoji=False, highlight=False)  # names are not markup
    if not console.is_terminal:
        console.width = 10_000  # a pipe or a log: nothing has to be cut
    console.print(shown)


def time_text(seconds: float) -> str:
    if not seconds:
        return "-"
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def print_summary(table: str, summary: Mapping[str, Any], histograms: bool, top: int) -> None:
    """Print what Summary.as_dict returned for a table."""
    mean, largest = summary["norm_mean"], summary["norm_max"]
    say(f"\n{table}: {summary['rows']:,} rows, norm {mean:.4g} in the mean, {largest:.4g} at most")
    for name, bins in summary["histograms"].items() if histograms else ():
        if bins:
            say(f"\n{table}: {_TITLES.get(name, name)}")
            for line in bars(name, bins):
                print(line)
    if top and summary["top"]:
        say(f"\n{table}: top keys by {summary['top_by']}")
        headings = list(summary["top"][0])
        lines = [
            [_number(line.get(name)) if name != "key" else str(line[name]) for name in headings]
            for line in summary["top"]
        ]
        print_table(headings, lines)


def bars(name: str, bins: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each bin from the first to the last that has rows."""
    rows = {(found["from"], found["to"]): found["rows"] for found in bins}
    limits = bin_limits(name)
    places = [i for i, limit in enumerate(limits) if limit in rows]
    chosen = limits[places[0] : places[-1] + 1]
    labels = [_label(name, *limit) for limit in chosen]
    most, width = max(rows.values()), max(map(len, labels))
    block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    for label, limit in zip(labels, chosen, strict=True):
        num = rows.get(limit, 0)
        length = max(1, round(_BAR * num / most)) if num else 0
        yield f"  {label:>{width}}  {num:>{len(f'{most:,}')},} {block * length}"


def _label(name: str, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"below {_short(high)}" if high is not None else f"from {_short(low or 0)}"
    if low == high:
        return _short(low)
    return f"{low:,}-{high:,}" if name.endswith("_days") else f"{_short(low)} to {_short(high)}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) and number < 10**9 else f"{number:.3g}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else f"{value:,}"
