"""The status file, by which a process reports to its launcher: small JSON, replaced in one step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchfleet.monitor.notices import tell

_PERIOD = 0.5  # seconds between two writes


class StatusFile:
    """Writes `make()` to a file, at most once in a period. Does nothing without a path."""

    def __init__(self, path: str | None, make: Callable[[], dict[str, Any]]) -> None:
        self._path, self._make = path, make
        self._next, self._has_told = 0.0, False

    def write(self, now: bool = False) -> None:
        """Write the status if a period has passed since the last time, or at once. A reader never sees half of it.

        A status that cannot be written, as on a full disk, is told once on stderr: training goes on without.
        """
        if self._path is None or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + _PERIOD
        unfinished = f"{self._path}.part"
        try:
            Path(unfinished).write_text(json.dumps(self._make()))
            os.replace(unfinished, self._path)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                tell(f"the status file {self._path} cannot be written: {error}. This process goes on without it.")
