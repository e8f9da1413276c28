"""The status file, by which a process reports to its launcher: small JSON, replaced in one step.

docs/watching.md has all fields. A field that does not apply to a process is left out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchfleet.monitor.notices import tell

_PERIOD = 0.5  # seconds between two writes
_PAGE = os.sysconf("SC_PAGE_SIZE")


class StatusFile:
    """Writes `make()` to a file, at most once in a period. Does nothing without a path."""

    def __init__(self, path: str | None, make: Callable[[], dict[str, Any]]) -> None:
        self._path, self._make = path, make
        self._next, self._has_told = 0.0, False
        self._host = socket.gethostname()

    def write(self, now: bool = False) -> None:
        """Write the status if a period has passed since the last time, or at once. A reader never sees half of it.

        A status that cannot be written, as on a full disk, is told once on stderr: training goes on without.
        """
        if self._path is None or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + _PERIOD
        unfinished = f"{self._path}.part"
        try:
            Path(unfinished).write_text(json.dumps({**self._make(), **self._process()}))
            os.replace(unfinished, self._path)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                tell(f"the status file {self._path} cannot be written: {error}. This process goes on without it.")

    def _process(self) -> dict[str, Any]:
        """What every process tells. The pid is asked for each time: a process may have been forked."""
        return {"host": self._host, "pid": os.getpid(), "memory": resident_bytes()}


def resident_bytes() -> int:
    """Memory that this process has in use."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
