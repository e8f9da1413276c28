"""Large files that are written past the page cache.

A file that is synced to disk when it is complete gains nothing from the cache, and copies into the cache take more
processor time than all else: see benchmarks/log.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from types import TracebackType
from typing import Any

import numpy as np

STAGED = 1 << 22  # bytes written at once
_ALIGNED = 4096  # bytes: offsets, lengths and addresses are multiples of it
_DIRECT = getattr(os, "O_DIRECT", 0)  # not all systems have it


class DirectFile:
    """A new file, which must not exist yet. A single thread uses it. As a context manager, it closes the file.

    If the file system does not support direct writes, the file is written through the page cache.
    """

    def __init__(self, place: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.open(place, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with contextlib.suppress(FileNotFoundError):  # Linux refuses the flag after it has created the file
                os.remove(place)
            self._file = os.open(place, flags, 0o666)
        self._staged = np.frombuffer(mmap.mmap(-1, STAGED), np.uint8)  # begins at a page
        self._num_staged = self._num_written = 0

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def write(self, data: Any) -> int:
        """Append the first bytes of `data`. Returns how many, at least one; the caller passes the rest next."""
        num = min(len(data), STAGED - self._num_staged)
        # numpy copies without holding Python's lock
        self._staged[self._num_staged : self._num_staged + num] = np.frombuffer(data, np.uint8, num)
        self._num_staged += num
        if self._num_staged == STAGED:
            self._write_out(STAGED)
        return num

    def flush(self) -> None:
        """Write what is left. Nothing can be appended afterwards."""
        size = self._num_written + self._num_staged
        if self._num_staged:
            self._write_out(-(-self._num_staged // _ALIGNED) * _ALIGNED)
            os.ftruncate(self._file, size)

    def fileno(self) -> int:
        return self._file

    def _write_out(self, num: int) -> None:
        done = 0
        while done < num:
            try:
                done += os.pwrite(self._file, self._staged[done:num].data, self._num_written + done)
            except OSError as error:
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)  # demands a larger alignment
        self._num_written += done
        self._num_staged = 0
