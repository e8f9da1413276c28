"""The status file, by which a process reports to its launcher: small JSON, replaced in one step."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PERIOD = 0.5  # seconds between two writes
# Fields that torchfleet itself reports. Every other field of a worker's status is a metric of the script.
KNOWN = (
    *("role", "mode", "steps", "steps_per_s", "samples_per_s", "queue", "waiting", "requests", "errors", "busy"),
    *("rows", "left", "staleness_dense", "staleness_sparse", "dropped"),
)


class StatusFile:
    """Writes `make()` to a file, at most once in a period. Does nothing without a path."""

    def __init__(self, path: str | None, make: Callable[[], dict[str, Any]]) -> None:
        self._path, self._make = path, make
        self._next = 0.0

    def write(self, now: bool = False) -> None:
        """Write the status if a period has passed since the last time, or at once. A reader never sees half of it."""
        if self._path is None or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + _PERIOD
        unfinished = f"{self._path}.part"
        with contextlib.suppress(OSError):  # a full disk, or no file to be had: what is shown gets old, nothing else
            Path(unfinished).write_text(json.dumps(self._make()))
            os.replace(unfinished, self._path)
