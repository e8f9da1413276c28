"""Converts values of a run's record for the page: bounded in size, with numbers that JSON supports."""

from __future__ import annotations

import math
from typing import Any

_MOST_TEXT = 200  # characters of a name or a text in a status
_MOST_ENTRIES = 200  # of one dictionary or list
_MOST_DEPTH = 5
_WIDE = 1 << 53  # from here on JavaScript rounds integers


def plain(value: Any, depth: int = 0) -> Any:
    """Return the value with long texts and large collections cut, and non-finite numbers as texts: "nan", "inf"."""
    if isinstance(value, (dict, list)):
        if depth >= _MOST_DEPTH:
            return None
        if isinstance(value, list):
            return [plain(found, depth + 1) for found in value[:_MOST_ENTRIES]]
        entries = list(value.items())[:_MOST_ENTRIES]
        return {str(name)[:_MOST_TEXT]: plain(found, depth + 1) for name, found in entries}
    if isinstance(value, float):
        return _short(value) if math.isfinite(value) else str(value)
    is_wide = isinstance(value, int) and abs(value) >= _WIDE
    return str(value)[:_MOST_TEXT] if is_wide or isinstance(value, str) else value


def number(value: Any) -> float | int | None:
    """The value if it is a finite number that a chart can show, with seven digits or more; else None."""
    if type(value) is float:  # not isinstance: this is called for every number of a record
        return _short(value) if math.isfinite(value) else None
    return value if type(value) is int and -_WIDE < value < _WIDE else None


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a dictionary; else an empty one."""
    return value if isinstance(value, dict) else {}


def _short(value: float) -> float:
    return round(value, 4) if abs(value) >= 100 else float(f"{value:.7g}")
