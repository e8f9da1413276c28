"""The folder of one server's log. It has numbered segments, and one process at a time writes the last of them.

A segment begins with a copy of the state, so the segments before it are needed only until that copy is whole. The file
`start` names the first segment that is needed. Older segments are removed; a killed server may leave some of them.
Without the file `start` no copy is whole, and the server has not served any request.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchfleet.base.errors import LogError, SecurityError
from torchfleet.base.ownership import make_own
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_records import Records

_NAME = "segment-{:08}.log"
_SEGMENT = re.compile(r"segment-([0-9]{8})\.log")
_START, _RUN = "start", "run"
_MAX_BUFFERS = 512  # buffers in one call of pwritev


class LogFolder:
    """The folder, locked for this process until `close`."""

    def __init__(self, path: str | Path) -> None:
        """Create the folder if it is missing, and lock it. Raises LogError if it is locked or unusable."""
        self.path = Path(path)
        try:
            make_own(self.path)  # what others write would become the model
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (OSError, SecurityError) as error:
            raise LogError(f"no log can be kept in {self.path}: {error}. Give another folder.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise LogError(f"{self.path} is the log of a server that runs: give every server its own folder") from None
        self._file = -1
        self.num_bytes = 0  # bytes of whole records in the last segment
        self.num_synced = 0  # how many of these bytes are synced to the disk

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no whole copy of a state to restore from."""
        return not (self.path / _START).exists()

    @property
    def run(self) -> str:
        """The launcher's run that the log belongs to; empty if none was noted."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / _RUN).read_text()
        return ""

    def note_run(self, run: str) -> None:
        """Write down that the log belongs to `run`. Not synced to the disk."""
        (self.path / _RUN).write_text(run)

    def entries(self) -> Iterator[list[Frame]]:
        """Yield all entries of the needed segments, in order. Their frames are views of the mapped files. At the end,
        cut an unfinished record off the last segment, and open it for `write`. Raises LogError if a file is damaged."""
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
            self.sync()  # after a loss of power the cut bytes must not reappear behind new records

    def begin_segment(self) -> int:
        """Sync the current segment, and open a new one for `write`. Returns its size, 0. Raises OSError."""
        numbers = self._numbers()
        if self._file >= 0:
            os.fdatasync(self._file)
        self._open(numbers[-1] + 1 if numbers else 1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.num_bytes = self.num_synced = 0
        self._sync_folder()
        return 0

    def write(self, buffers: Sequence[Frame]) -> int:
        """Append all buffers to the segment, or none of them. Returns the size of the segment. Raises OSError."""
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
        """Block until all written bytes are on the disk. Raises OSError."""
        num_bytes = self.num_bytes
        os.fdatasync(self._file)
        self.num_synced = num_bytes

    def forget_before_last(self) -> int:
        """Remove the segments before the last, which must have a whole copy of the state. Returns its size in bytes."""
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
        """Remove all segments and `start`, so that no server restores from this folder. The lock stays."""
        for number in self._all():
            (self.path / _NAME.format(number)).unlink(missing_ok=True)
        (self.path / _START).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        os.close(self._lock)

    def _write_some(self, buffers: list[Frame], at: int) -> int:
        """Write all buffers from byte `at` on. Returns the position behind them. Empties `buffers`."""
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
        """The numbers of the needed segments, ascending. Raises LogError if one is missing, or `start` is damaged."""
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
    """The bytes of a file. The file stays mapped as long as the result, or a slice of it, exists."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if not size:
            return memoryview(b"")
        # Kernels require writable memory. The mapping is private, so writes do not reach the file.
        return memoryview(mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
