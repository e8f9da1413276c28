"""The folder of one server's log: segments one after the other, of which one process writes the last.

A segment begins with a copy of the state, so the segments before it are needed only until that copy is whole. The file
`start` names the first segment that is needed; older ones are removed, now or later. Without this file no copy is
whole, and the server has not served any request.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchfleet.base.errors import LogError
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_records import Records

_NAME = "segment-{:08}.log"
_SEGMENT = re.compile(r"segment-([0-9]{8})\.log")
_START, _RUN = "start", "run"
_MAX_BUFFERS = 512  # of one call of writev


class LogFolder:
    """Held by this process alone until it is closed."""

    def __init__(self, path: str | Path) -> None:
        """Makes the folder. Raises LogError if another process has it, or it cannot be used."""
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LogError(f"no log can be kept in {self.path}: {error}. Give another folder.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise LogError(f"{self.path} is the log of a server that runs: give every server its own folder") from None
        self._file = -1
        self.num_bytes = 0  # of whole records in the last segment
        self.num_synced = 0  # of these, on the disk for good

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to restore from."""
        return not (self.path / _START).exists()

    @property
    def run(self) -> str:
        """Of which launcher's run it is the log; empty: of none."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / _RUN).read_text()
        return ""

    def note_run(self, run: str) -> None:
        """It is that of this run from now on."""
        (self.path / _RUN).write_text(run)

    def entries(self) -> Iterator[list[Frame]]:
        """All entries from the first segment that is needed on, over the files' memory. Then the last segment can be
        written on: what was never finished at its end is cut off. Raises LogError for damage, and names the place."""
        numbers = self._numbers()
        for number in numbers:
            file = self.path / _NAME.format(number)
            is_last = number == numbers[-1]
            records = Records(_mapped(file), str(file), is_synced=not is_last)
            yield from records
            if records.is_torn and not is_last:
                raise LogError(f"{file} ends inside a record, and {_NAME.format(numbers[-1])} follows it: it was cut")
            self.num_bytes = records.end
        if numbers:
            self._open(numbers[-1], os.O_WRONLY)
            os.ftruncate(self._file, self.num_bytes)
            self.sync()  # what was cut off must not come back behind what is written now

    def begin_segment(self) -> int:
        """A new one, which is written from now on; returns its bytes."""
        numbers = self._numbers()
        if self._file >= 0:
            os.fdatasync(self._file)
        self._open(numbers[-1] + 1 if numbers else 1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.num_bytes = self.num_synced = 0
        self._sync_folder()
        return 0

    def write(self, buffers: Sequence[Frame]) -> int:
        """Behind all before, or not at all; returns the bytes of the segment. Raises OSError."""
        try:
            end = self.num_bytes
            for start in range(0, len(buffers), _MAX_BUFFERS):
                end = self._write_some(list(buffers[start : start + _MAX_BUFFERS]), end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.num_bytes)
            raise
        self.num_bytes = end
        return end

    def sync(self) -> None:
        """All that was written is on the disk when this returns."""
        num_bytes = self.num_bytes
        os.fdatasync(self._file)
        self.num_synced = num_bytes

    def forget_before_last(self) -> int:
        """The last segment has a whole copy of the state: those before it are not needed. Returns its bytes."""
        numbers = self._numbers()
        self.sync()
        new = self.path / f"{_START}.new"
        with new.open("w") as file:
            file.write(f"{numbers[-1]}\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path / _START)
        self._sync_folder()
        for number in self._all():
            if number < numbers[-1]:
                (self.path / _NAME.format(number)).unlink()
        return self.num_bytes

    def remove(self) -> None:
        """Remove the log. The server has ended in an orderly way, so no server will restore from it."""
        for number in self._all():
            (self.path / _NAME.format(number)).unlink(missing_ok=True)
        (self.path / _START).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        os.close(self._lock)

    def _write_some(self, buffers: list[Frame], at: int) -> int:
        """All of these, from byte `at` on; returns the byte behind them."""
        while buffers:
            num = os.pwritev(self._file, buffers, at)
            at += num
            while buffers and num >= memoryview(buffers[0]).nbytes:
                num -= memoryview(buffers.pop(0)).nbytes
            if buffers and num:
                buffers[0] = memoryview(buffers[0]).cast("B")[num:]
        return at

    def _all(self) -> list[int]:
        found = (_SEGMENT.fullmatch(name) for name in os.listdir(self.path))
        return sorted(int(match[1]) for match in found if match)

    def _numbers(self) -> list[int]:
        """Of the segments that are needed. Raises LogError if one of them is missing."""
        numbers, first = self._all(), 1
        with contextlib.suppress(FileNotFoundError):
            text = (self.path / _START).read_text()
            if not re.fullmatch(r"[0-9]{1,8}\n", text):
                raise LogError(f"{self.path / _START} is damaged: expected the number of a segment, found {text!r:.40}")
            first = int(text)
        needed = [number for number in numbers if number >= first]
        if needed != list(range(first, first + len(needed))) or (first > 1 and not needed):
            raise LogError(f"{self.path}: expected segments from {first} on, found {needed}: files are missing")
        return needed

    def _open(self, number: int, flags: int) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = os.open(self.path / _NAME.format(number), flags | os.O_CLOEXEC, 0o600)

    def _sync_folder(self) -> None:
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _mapped(file: Path) -> memoryview:
    """The bytes of a file, mapped as long as the memory is referenced."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if not size:
            return memoryview(b"")
        # Kernels want memory that could be written; what they write there does not reach the file.
        return memoryview(mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
