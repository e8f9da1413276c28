"""The status file, by which a process reports to its launcher: small JSON, replaced in one step.

docs/watching.md has all fields. A field that does not apply to a process is left out.
"""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torchfleet.base.monitor.notices import tell

_PERIOD = 0.5  # seconds between two writes
_PATIENCE = 5.0  # seconds that the end of a process waits for the disk
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
        self._file = None if path is None else _StatusWriter(path)
        self._make, self._port = make, port
        self._next = math.inf if path is None and port is None else 0.0  # when the next one is due
        self._one = threading.Lock()  # the training thread writes it, and others beside it
        self._host = socket.gethostname()

    def step_made(self) -> None:
        """A training step has ended."""
        if self._port is not None:
            self._port.step_made()
        self.write()

    def write(self, now: bool = False) -> None:
        """Write the status if a period has passed since the last time, or at once. A reader never sees half of it.

        Called for every step, and for every turn of a server's loop: one look at a clock is all that most calls do, and
        none waits for the disk but those that write at once. A status that cannot be written, as on a full disk, is
        told once on stderr: training goes on without.
        """
        if now or time.monotonic() >= self._next:
            self._write_due(now)

    def _write_due(self, now: bool) -> None:
        with self._one:
            is_due = time.monotonic() >= self._next  # another thread may have written it meanwhile
            if (self._file is None and self._port is None) or not (now or is_due):
                return
            self._next = time.monotonic() + _PERIOD
            status = {**self._make(), **self._process()}
            if self._port is not None:
                self._port.publish(status)
            if self._file is not None:
                self._file.put(json.dumps(status), now)

    def close(self) -> None:
        """The port is given back; the file stays for its reader, with the last status in it."""
        port, self._port = self._port, None
        if port is not None:
            port.close()
        if self._file is not None:
            self._file.close()

    def _process(self) -> dict[str, Any]:
        """What every process tells. The pid is asked for each time: a process may have been forked."""
        return {"host": self._host, "pid": os.getpid(), "memory": resident_bytes()}


class _StatusWriter:
    """Replaces a file by one text after the other, from a thread of its own, which is there from the first on.

    To replace a file may take milliseconds of waiting for the disk: ext4 first gives the new one its blocks there.
    """

    def __init__(self, path: str) -> None:
        self._path, self._has_told = path, False
        self._one = threading.Lock()  # around the file
        self._latest: str | None = None  # what is not written yet
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the end
        self._thread: threading.Thread | None = None

    def put(self, text: str, now: bool) -> None:
        """`now`: it is there when this returns."""
        self._latest = text
        if now:
            self._write_latest()
            return
        if self._thread is None or not self._thread.is_alive():  # not alive: this process was forked
            self._thread = threading.Thread(target=self._run, name="status file", daemon=True)
            self._thread.start()
        self._wake.put(True)

    def close(self) -> None:
        """What was put is there, unless the disk takes too long for it."""
        if self._thread is not None:
            self._wake.put(False)
            self._thread.join(_PATIENCE)
            self._thread = None

    def _run(self) -> None:
        while self._wake.get():
            self._write_latest()

    def _write_latest(self) -> None:
        with self._one:
            text, self._latest = self._latest, None
            if text is None:
                return
            unfinished = f"{self._path}.part"
            try:
                Path(unfinished).write_text(text)
                os.replace(unfinished, self._path)
            except OSError as error:
                if not self._has_told:
                    self._has_told = True
                    tell(f"the status file {self._path} cannot be written: {error}. This process goes on without it.")


def resident_bytes() -> int:
    """Memory that this process has in use."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
