"""The log of a process: its unmodified output, in at most two files of a given size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

DEFAULT_BYTES = 1 << 30


def before(log: Path) -> Path:
    """The path of the previous log file, which was full when `log` was begun."""
    return log.with_name(f"{log.name}.1")


def last_bytes(log: Path, num: int) -> bytes:
    """The last `num` bytes of a log, across both of its files."""
    found = b""
    for path in (log, before(log)):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (num - len(found))))
            found = file.read(num - len(found)) + found
        if len(found) >= num:
            break
    return found


class LogFile:
    """A log file with one writing thread. A file that reaches `max_bytes` is renamed and replaces the previous one.

    Others may rotate it: after a rename or a removal the output goes to a new file of the same name, after a truncation
    (copytruncate) to its beginning. A full or missing disk does not stop the process that is logged: `complain` is
    called once, and output that cannot be written is lost.
    """

    def __init__(self, path: Path, append: bool, max_bytes: int, complain: Callable[[str], None]) -> None:
        self._path, self._max_bytes, self._complain = path, max_bytes, complain
        self._file: IO[bytes] | None = None
        self._size, self._has_told = 0, False
        try:
            if not append:
                path.write_bytes(b"")
            self._open()
            if self._size and last_bytes(path, 1) != b"\n":
                self.write(b"\n")  # the previous process was killed in the middle of a line
        except OSError as error:
            self._tell(str(error))

    def write(self, data: bytes) -> None:
        try:
            self._follow()
            if self._size and self._size + len(data) > self._max_bytes:
                self._begin_anew()
            written = (self._file or self._open()).write(data)
            self._size += written
        except OSError as error:
            self._tell(str(error))
        else:
            if written < len(data):
                self._tell("no space is left")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        # Append mode: after a truncation by others, writing at a fixed position would leave a hole in the file.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  (until close)
        self._size = self._file.seek(0, os.SEEK_END)
        return self._file

    def _begin_anew(self) -> None:
        self.close()
        os.replace(self._path, before(self._path))
        self._open()

    def _follow(self) -> None:
        """Close the file if it was renamed or removed, and note its size if it was truncated."""
        if self._file is None:
            return
        own = os.fstat(self._file.fileno())
        self._size = min(self._size, own.st_size)
        try:
            is_same = os.path.samestat(own, os.stat(self._path))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self.close()

    def _tell(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._complain(f"{self._path} cannot be written to ({why}): the process goes on, and its output is lost")
