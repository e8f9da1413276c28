"""The folder of one server's log. It has numbered segments, and one process at a time writes the last of them.

A segment begins with a copy of the state, so the segments before it are needed only until that copy is whole. The file
`start` (log_start.py) says which segments are needed, and a crash after any step leaves a folder that it describes:

    begin               `start` with first=0; then segment 1 may have a part of a copy, and no request was answered
    begin_segment       sync the last segment; make the next one, empty; `start` with a new `last`; then write
    forget_before_last  sync the segment, which has a whole copy; `start` with a new `first` and run
    remove_forgotten    remove older segments, beside all other steps
    note_term           `start` with a new term
    remove              rename `start` to `over`; remove all segments; remove `over`

`start` is replaced by a rename, and names are synced after each of these steps. A folder that no crash leaves, such as
one with segments and without `start`, is refused, and nothing in it is changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from torchfleet.base.errors import LogError, SecurityError
from torchfleet.base.ownership import make_own
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_files import (
    drop_pages,
    forget_cached,
    map_file,
    open_file,
    sync_failed,
    sync_folder,
    sync_path,
)
from torchfleet.ps.server.log.log_records import Records
from torchfleet.ps.server.log.log_start import START, Start, read_start, write_start

_NAME = "segment-{:08}.log"
_SEGMENT = re.compile(r"segment-([0-9]{8})\.log")
_UNSYNCED = "unsynced"  # a sync has failed: until the machine loses power, its cache may have what the disk lacks
_OVER = "over"  # instead of `start`: the job has ended, and all segments may be removed
_MAX_BUFFERS = 512  # buffers in one call of pwritev


class LogFolder:
    """The folder of a log, locked for this process until `close`."""

    def __init__(self, path: str | Path) -> None:
        """Create the folder if it is missing, and lock it. Raises LogError if it is locked or unusable."""
        self.path = Path(path)
        try:
            make_own(self.path)  # or what other users write would become the model
            self._lock = open_file(self.path / "lock", os.O_CREAT | os.O_RDWR)
        except (OSError, SecurityError) as error:
            raise LogError(f"no log can be kept in {self.path}: {error}. Give another folder.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise LogError(f"{self.path} is the log of a server that runs: give every server its own folder") from None
        self._file = -1
        self._start: Start | None = None  # as it is on the disk; None: there is no log
        self.run = ""  # the run that is noted with the next whole copy
        self.num_bytes = 0  # bytes of whole records in the last segment
        self._number = 0  # of the segment that is open for `write`
        self._synced = (0, 0)  # the number of a segment, and how many of its bytes are synced to the disk

    def open(self) -> bool:
        """Read `start`, and set `run`. Returns whether there is a whole copy of a state to restore from. Raises
        LogError if files are missing or damaged."""
        with self._naming():
            self._start = self._read()
        self.run = "" if self._start is None else self._start.run
        return self._start is not None and self._start.first > 0

    def begin(self, run: str, term: int = 0) -> None:
        """Begin a new log of `run`. `term`: as in Start. Removes what is left of a log that was being removed, and
        nothing else. Raises LogError if the folder has a log."""
        if self.open():
            raise LogError(
                f"{self.path} has the log of another server, begun meanwhile: give every server its own folder"
            )
        with self._naming():
            self._finish_removal()
            self._start, self.run = Start(0, 0, run, term, secrets.randbits(63)), run
            write_start(self.path, self._start)
            sync_path(self.path)

    def entries(self) -> Iterator[list[Frame]]:
        """Yield all entries of the needed segments, in order; `open` must have returned True. Their frames are views
        of the mapped files. At the end, cut an unfinished record off the last segment, and open it for `write`. Raises
        LogError if a file is damaged."""
        assert self._start is not None
        last = self._start.last
        if os.path.lexists(self.path / _UNSYNCED):
            with self._naming():
                forget_cached(self.path / _NAME.format(last))
        for number in range(self._start.first, last + 1):
            file = self.path / _NAME.format(number)
            records = Records(map_file(file), str(file), is_synced=number < last, salt=self.salt)
            yield from records
            if records.is_torn and number < last:
                raise LogError(f"{file} ends inside a record, and {_NAME.format(last)} follows it: it was cut")
            self.num_bytes = records.end
        with self._naming():
            self._open(last, os.O_WRONLY)
            os.ftruncate(self._file, self.num_bytes)
            self.sync()  # after a loss of power the cut bytes must not reappear behind new records
            (self.path / _UNSYNCED).unlink(missing_ok=True)

    def begin_segment(self) -> None:
        """Sync the current segment, and open a new one for `write`. Raises OSError."""
        assert self._start is not None
        number = self._start.last + 1
        if self._file >= 0:
            self._sync(self._file)
        self.num_bytes = 0  # before the number changes, which `sync_behind` reads first
        self._open(number, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # an existing one has no entries yet
        sync_folder(self.path)
        if self._start.first:
            self._note(replace(self._start, last=number))

    def write(self, buffers: Sequence[Frame]) -> None:
        """Append all buffers to the segment, or none of them. Raises OSError."""
        try:
            end = self.num_bytes
            for start in range(0, len(buffers), _MAX_BUFFERS):
                end = self._write_some(list(buffers[start : start + _MAX_BUFFERS]), end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.num_bytes)
            raise
        self.num_bytes = end

    @property
    def salt(self) -> int:
        """The salt of all records of this log."""
        return 0 if self._start is None else self._start.salt

    @property
    def num_synced(self) -> int:
        """How many bytes of the last segment are synced to the disk."""
        number, num_bytes = self._synced
        return num_bytes if number == self._number else 0

    def sync(self) -> None:
        """Block until all written bytes are on the disk. Raises OSError, also if the segment has lost its name."""
        if self._file >= 0:
            num_bytes = self.num_bytes
            self._sync(self._file)
            if not os.fstat(self._file).st_nlink:
                raise self._lost_name()
            self._note_synced(self._file, self._number, num_bytes)

    def sync_behind(self) -> None:
        """As `sync`, for a thread other than the one that writes. The latter may begin a segment meanwhile."""
        number, num_bytes = self._number, self.num_bytes
        try:
            file = os.open(self.path / _NAME.format(number), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if number and number == self._number:
                raise self._lost_name() from None
            return  # it was synced before the next one began
        try:
            self._sync(file)
            self._note_synced(file, number, num_bytes)
        finally:
            os.close(file)

    def _note_synced(self, file: int, number: int, num_bytes: int) -> None:
        first = self._synced[1] if self._synced[0] == number else 0
        drop_pages(file, first, num_bytes)
        self._synced = number, num_bytes

    def _sync(self, file: int) -> None:
        """Raises SyncFailed. A process that is started again must not take the cached bytes for synced."""
        try:
            os.fdatasync(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                (self.path / _UNSYNCED).touch()
            raise sync_failed(error) from error

    def forget_before_last(self) -> None:
        """Write into `start` that only the last segment is needed, and that the log is of `run`. The segment must have
        a whole copy of the state. Raises OSError. `remove_forgotten` removes the others."""
        assert self._start is not None
        last = self._start.last if self._start.first else 1
        self.sync()
        self._note(replace(self._start, first=last, last=last, run=self.run))

    def remove_forgotten(self) -> None:
        """Remove the segments that are not needed, also those that an earlier call has left. One thread at a time may
        call it: to remove a gigabyte takes a tenth of a second, and a second on a busy disk. Raises OSError."""
        assert self._start is not None
        first = self._start.first
        self._unlink(number for number in self._all() if number < first)

    @property
    def term(self) -> int:
        """The term in `start`; 0 without a log."""
        return 0 if self._start is None else self._start.term

    def note_term(self, term: int) -> None:
        """Write the term into `start`, durably. Raises OSError."""
        assert self._start is not None
        self._note(replace(self._start, term=term))

    def remove(self) -> None:
        """Remove the log, so that no server restores from this folder. The lock stays. Raises LogError."""
        with self._naming():
            if self._start is not None:
                os.rename(self.path / START, self.path / _OVER)
                sync_folder(self.path)
                self._start = None
            self._finish_removal()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        os.close(self._lock)

    def _lost_name(self) -> OSError:
        text = "a segment was removed while the server wrote to it"
        return FileNotFoundError(errno.ENOENT, text, str(self.path / _NAME.format(self._number)))

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

    def _finish_removal(self) -> None:
        if os.path.lexists(self.path / _OVER):
            (self.path / _UNSYNCED).unlink(missing_ok=True)
            self._unlink(self._all())
            sync_folder(self.path)  # without `over`, no segment may reappear
            os.unlink(self.path / _OVER)
            sync_folder(self.path)

    def _unlink(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            os.unlink(self.path / _NAME.format(number))

    def _note(self, start: Start) -> None:
        write_start(self.path, start)
        self._start = start

    def _all(self) -> list[int]:
        found = (_SEGMENT.fullmatch(name) for name in os.listdir(self.path))
        return sorted(int(match[1]) for match in found if match)

    def _read(self) -> Start | None:
        """What `start` says; None if there is no log. Raises LogError if the files do not fit it."""
        has_start, has_over = (os.path.lexists(self.path / name) for name in (START, _OVER))
        found = self._all()
        if has_start and has_over:
            raise self._unfit(f"both {START} and {_OVER}", f"{START} alone")
        if not has_start:
            if found and not has_over:
                raise self._unfit(f"{_NAME.format(found[0])} without {self.path / START}", "both, or neither")
            return None
        start = read_start(self.path)
        needed = range(start.first or 1, start.last + 1)
        missing = [number for number in needed if number not in found]
        if missing:
            raise self._unfit(f"none of number {missing[0]}", f"segments {needed[0]} to {needed[-1]}")
        for number in found:
            if number > start.last and not self._is_unused(number, start):
                raise self._unfit(f"{_NAME.format(number)}", f"no segment behind number {start.last}")
        return start

    def _is_unused(self, number: int, start: Start) -> bool:
        """Whether a crash explains this segment, which `start` does not name: no entry of it was confirmed."""
        is_blank = not start.first or not (self.path / _NAME.format(number)).lstat().st_size
        return number == start.last + 1 and is_blank

    def _unfit(self, found: str, expected: str) -> LogError:
        return LogError(
            f"{self.path}: expected {expected}, found {found}. The log is not used, and nothing was removed. Bring the "
            "missing files back, or go on from the last checkpoint, with another folder for the log."
        )

    def _open(self, number: int, flags: int) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = open_file(self.path / _NAME.format(number), flags)
        self._number = number

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn an OSError into a LogError that names the folder."""
        try:
            yield
        except OSError as error:
            raise LogError(f"the log in {self.path} cannot be read or written: {error}") from error
