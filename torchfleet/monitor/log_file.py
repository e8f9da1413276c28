"""The log of a process: its output as it wrote it, in at most two files of a given size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

DEFAULT_BYTES = 1 << 30


def before(log: Path) -> Path:
    """Where the log lies that was full when this one was begun."""
    return log.with_name(f"{log.name}.1")


def last_bytes(log: Path, num: int) -> bytes:
    """The end of a log, over both of its files."""
    found = b""
    for path in (log, before(log)):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (num - len(found))))
            found = file.read(num - len(found)) + found
        if len(found) >= num:
            break
    return found


class LogFile:
    """Written by one thread. A log that has reached `max_bytes` is put aside, in the place of the one before it.

    A disk that is full, or gone, does not stop the process whose log this is: `complain` is told once, and what cannot
    be written is lost.
    """

    def __init__(self, path: Path, append: bool, max_bytes: int, complain: Callable[[str], None]) -> None:
        self._path, self._max_bytes, self._complain = path, max_bytes, complain
        self._file: IO[bytes] = open(path, "ab" if append else "wb", buffering=0)  # noqa: SIM115  (until close)
        self._size = self._file.seek(0, os.SEEK_END)
        self._num_lost = 0

    def write(self, data: bytes) -> None:
        try:
            if self._size and self._size + len(data) > self._max_bytes:
                self._begin_anew()
            written = self._file.write(data)
            self._size += written
        except OSError as error:
            self._lose(len(data), str(error))
        else:
            if written < len(data):
                self._lose(len(data) - written, "no space is left")

    def close(self) -> None:
        self._file.close()

    def _begin_anew(self) -> None:
        self._file.close()
        os.replace(self._path, before(self._path))
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115  (until close)
        self._size = 0

    def _lose(self, num: int, why: str) -> None:
        if not self._num_lost:
            self._complain(f"{self._path} cannot be written to ({why}): the process goes on, and its output is lost")
        self._num_lost += num
