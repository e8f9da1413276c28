"""The status file, with which a process reports to its launcher: a small JSON file that is replaced atomically.

docs/watching.md lists all fields. A field that does not apply to a process is omitted.
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
_PATIENCE = 5.0  # seconds that a process waits for the disk when it ends
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Port(Protocol):
    """Where a status is published in addition to the file: prometheus/metrics_port.py."""

    def publish(self, status: dict[str, Any]) -> None:
        """Publish a status. The port takes ownership of `status`."""

    def step_made(self) -> None: ...

    def close(self) -> None: ...


class StatusFile:
    """Writes `make()` to a file and publishes it on a port, at most once per period. Without either, does nothing."""

    def __init__(self, path: str | None, make: Callable[[], dict[str, Any]], port: Port | None = None) -> None:
        self._file = None if path is None else _StatusWriter(path)
        self._make, self._port = make, port
        self._next = math.inf if path is None and port is None else 0.0  # when the next write is due
        self.last_step = 0.0  # when the last training step ended, by time.monotonic()
        self._one = threading.Lock()  # the training thread and others write
        self._host = socket.gethostname()

    @property
    def is_read(self) -> bool:
        """Whether there is a file or a port."""
        return self._file is not None or self._port is not None

    def step_made(self) -> None:
        """Record the end of a training step."""
        if self._port is not None:
            self._port.step_made()
        self.last_step = now = time.monotonic()
        if now >= self._next:
            self._write_due(False)

    def write(self, now: bool = False) -> None:
        """Write the status if a period has passed since the last write, or at once with `now`. Replaces the file
        atomically.

        Every step calls this, and every iteration of a server's event loop. Most calls only read a clock, and only
        calls with `now` wait for the disk. If the status cannot be written, as on a full disk, a message is printed
        once to stderr and training continues.
        """
        if now or time.monotonic() >= self._next:
            self._write_due(now)

    def _write_due(self, now: bool) -> None:
        with self._one:
            is_due = time.monotonic() >= self._next  # another thread may have written it in the meantime
            if (self._file is None and self._port is None) or not (now or is_due):
                return
            self._next = time.monotonic() + _PERIOD
            status = {**self._make(), **self._process()}
            if self._port is not None:
                self._port.publish(status)
            if self._file is not None:
                self._file.put(json.dumps(status), now)

    def close(self) -> None:
        """Close the port. The file stays for its reader, with the last status."""
        port, self._port = self._port, None
        if port is not None:
            port.close()
        if self._file is not None:
            self._file.close()

    def _process(self) -> dict[str, Any]:
        """Fields that every process reports. The pid is read each time, since the process may have been forked."""
        return {"host": self._host, "pid": os.getpid(), "memory": resident_bytes()}


class _StatusWriter:
    """Replaces the contents of a file from a background thread, which the first `put` starts.

    Replacing a file may wait milliseconds for the disk: ext4 allocates the blocks of the new file first.
    """

    def __init__(self, path: str) -> None:
        self._path, self._has_told = path, False
        self._one = threading.Lock()  # guards the file
        self._latest: str | None = None  # not written yet
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: end the thread
        self._thread: threading.Thread | None = None

    def put(self, text: str, now: bool) -> None:
        """Write `text` in the background; with `now`, before this returns."""
        self._latest = text
        if now:
            self._write_latest()
            return
        if self._thread is None or not self._thread.is_alive():  # a thread that is not alive: this process was forked
            self._thread = threading.Thread(target=self._run, name="status file", daemon=True)
            self._thread.start()
        self._wake.put(True)

    def close(self) -> None:
        """Wait for the last write, for a limited time."""
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
    """The resident memory of this process, in bytes."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
