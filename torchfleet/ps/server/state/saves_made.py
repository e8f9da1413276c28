"""The saves that a server has made its part of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SavesMade:
    """How many, and the last one."""

    num: int = 0
    last_time: float = 0.0  # seconds since 1970
    last_seconds: float = 0.0  # that it took
    last_rows: int = 0
    last_bytes: int = 0
    dirname: str = ""
