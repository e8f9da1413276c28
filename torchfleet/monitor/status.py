"""What a process tells its launcher: a small JSON file, replaced whole, a few times a second."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PERIOD = 0.5
# What torchfleet itself tells; everything else in a worker's status is a metric of the script.
KNOWN = ("role", "mode", "steps", "steps_per_s", "samples_per_s", "queue", "requests", "errors", "rows", "left")


class StatusFile:
    """Writes `make()` to a file when the last time is long enough ago; does nothing without a file."""

    def __init__(self, path: str | None, make: Callable[[], dict[str, Any]]) -> None:
        self._path, self._make = path, make
        self._next = 0.0

    def write(self, now: bool = False) -> None:
        if self._path is None or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + _PERIOD
        part = f"{self._path}.part"
        Path(part).write_text(json.dumps(self._make()))
        os.replace(part, self._path)
