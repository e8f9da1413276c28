"""What a record of a run holds, made fit for a page: bounded, and with numbers that JSON has."""

from __future__ import annotations

import math
from typing import Any

_MOST_TEXT = 200  # characters of a name or a text in a status
_MOST_ENTRIES = 200  # of one dictionary or list
_MOST_DEPTH = 5


def plain(value: Any, depth: int = 0) -> Any:
    """The value with long texts cut, large collections cut, and numbers that are not finite as texts: "nan", "inf"."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 53 else str(value)  # a key of 64 bits: JavaScript would round it
    if isinstance(value, float):
        return _short(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value[:_MOST_TEXT]
    if depth >= _MOST_DEPTH:
        return None
    if isinstance(value, dict):
        return {str(name)[:_MOST_TEXT]: plain(found, depth + 1) for name, found in list(value.items())[:_MOST_ENTRIES]}
    if isinstance(value, (list, tuple)):
        return [plain(found, depth + 1) for found in value[:_MOST_ENTRIES]]
    return None


def number(value: Any) -> float | int | None:
    """The value if it is a finite number, with seven digits or more; else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else _short(value)


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a dictionary; else an empty one."""
    return value if isinstance(value, dict) else {}


def _short(value: float) -> float:
    return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.7g}")  # times keep their milliseconds
