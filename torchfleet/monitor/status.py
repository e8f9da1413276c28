"""The status file, by which a process reports to its launcher: small JSON, replaced in one step."""

from __future__ import annotations

import json
import os
import threading
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
        self._one = threading.Lock()  # the training thread writes it, and others beside it

    def write(self, now: bool = False) -> None:
        """Write the status if a period has passed since the last time, or at once. A reader never sees half of it.

        A status that cannot be written, as on a full disk, is told once on stderr: training goes on without.
        """
        if self._path is None:
            return
        with self._one:
            if now or time.monotonic() >= self._next:
                self._next = time.monotonic() + _PERIOD
                self._replace(self._path)

    def _replace(self, path: str) -> None:
        unfinished = f"{path}.part"
        try:
            Path(unfinished).write_text(json.dumps(self._make()))
            os.replace(unfinished, path)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                tell(f"the status file {path} cannot be written: {error}. This process goes on without it.")
