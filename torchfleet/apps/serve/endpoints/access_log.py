"""The access log: one line of JSON per request."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec


class AccessLog:
    """Writes lines to a file, or to stdout for "-". Several processes may append to one file."""

    def __init__(self, path: str, worker: int) -> None:
        # Each line is one write, so that lines of several processes do not mix.
        self._file: Any = sys.stdout.buffer if path == "-" else open(path, "ab", buffering=0)  # noqa: SIM115
        self._worker = worker

    def write(self, scope: Mapping[str, Any], status: int, seconds: float, num_bytes: int) -> None:
        client = scope.get("client")
        line = {
            "time": round(time.time(), 3),
            "client": client[0] if client else "",
            "method": scope["method"][:20],
            "path": scope["path"][:500],
            "status": status,
            "ms": round(1000 * seconds, 3),
            "bytes": num_bytes,
            "process": self._worker,
        }
        with contextlib.suppress(OSError):  # a full disk, or a pipe without a reader: the answer has been sent
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
