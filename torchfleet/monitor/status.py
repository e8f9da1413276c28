"""The status file, by which a process reports to its launcher: small JSON, replaced in one step.

docs/watching.md has all fields. A field that does not apply to a process is left out.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torchfleet.monitor.notices import tell

_PERIOD = 0.5  # seconds between two writes
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Port(Protocol):
    """Where a status is published beside the file: prometheus/metrics_port.py."""

    def publish(self, status: dict[str, Any]) -> None:
        """`status` belongs to the port from now on."""

    def step_made(self) -> None: ...

    def close(self) -> None: ...


class StatusFile:
    """Writes `make()` to a file, and publishes it on a port, at most once in a period. Does nothing without either."""

    def __init__(self, path: str | None, make: Callable[[], dict[str, Any]], port: Port | None = None) -> None:
        self._path, self._make, self._port = path, make, port
        self._next = math.inf if path is None and port is None else 0.0  # when the next one is due
        self._has_told = False
        self._one = threading.Lock()  # the training thread writes it, and others beside it
        self._host = socket.gethostname()

    def step_made(self) -> None:
        """A training step has ended."""
        if self._port is not None:
            self._port.step_made()
        self.write()

    def write(self, now: bool = False) -> None:
        """Write the status if a period has passed since the last time, or at once. A reader never sees half of it.

        Called for every step, and for every turn of a server's loop: one look at a clock is all that most calls do. A
        status that cannot be written, as on a full disk, is told once on stderr: training goes on without.
        """
        if now or time.monotonic() >= self._next:
            self._write_due(now)

    def _write_due(self, now: bool) -> None:
        with self._one:
            is_due = time.monotonic() >= self._next  # another thread may have written it meanwhile
            if (self._path is None and self._port is None) or not (now or is_due):
                return
            self._next = time.monotonic() + _PERIOD
            status = {**self._make(), **self._process()}
            if self._port is not None:
                self._port.publish(status)
            if self._path is not None:
                self._write_file(self._path, status)

    def close(self) -> None:
        """The port is given back; the file stays for its reader."""
        port, self._port = self._port, None
        if port is not None:
            port.close()

    def _write_file(self, path: str, status: dict[str, Any]) -> None:
        unfinished = f"{path}.part"
        try:
            Path(unfinished).write_text(json.dumps(status))
            os.replace(unfinished, path)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                tell(f"the status file {path} cannot be written: {error}. This process goes on without it.")

    def _process(self) -> dict[str, Any]:
        """What every process tells. The pid is asked for each time: a process may have been forked."""
        return {"host": self._host, "pid": os.getpid(), "memory": resident_bytes()}


def resident_bytes() -> int:
    """Memory that this process has in use."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
