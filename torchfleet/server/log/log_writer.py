"""Entries on their way to a file, in a thread of their own: the server's loop never waits for a disk."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torchfleet.background import BackgroundThreads
from torchfleet.net.wire import Frame
from torchfleet.server.log.log_folder import LogFolder
from torchfleet.server.log.log_records import record_of

MAX_BEHIND = 1 << 28  # bytes that wait for the disk; with more no change is taken
COPY_BEHIND = 1 << 24  # the same for pieces of the state: changes go first
_PAUSE = 0.5  # seconds between two attempts on a disk that takes nothing
_MAX_BUFFERS = 512  # of one call
_CURABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

Waiting = tuple[int, Sequence[Frame], int] | Callable[[], int]  # an entry and its bytes, or something to be done


class LogWriter:
    """A Sink: the segment of a folder that is written now.

    With `fsync_ms` 0 an entry is confirmed when it is on the disk; else when the system has it, which brings it to the
    disk within so many milliseconds: a server that is killed loses nothing, and a machine that loses power what was
    confirmed in that time.
    """

    def __init__(self, folder: LogFolder, index: int, fsync_ms: float, wake: Callable[[], None]) -> None:
        """`index`: of the last entry in the folder. `wake` is called, by the thread, when more is confirmed."""
        self._folder, self._fsync_seconds, self._wake = folder, fsync_ms / 1000, wake
        self._confirmed, self._trouble = index, ""
        self._queue: deque[Waiting] = deque()
        self._num_bytes = 0  # in the queue
        self._num_under_way = 0  # entries and other things that are not done
        self._changed = threading.Condition()
        self._is_over = False
        self.segment_bytes = folder.num_bytes  # of the segment that is written
        self._synced_at, self._is_dirty = time.monotonic(), False
        self._threads = BackgroundThreads([self._run], "the log")
        self._threads.start()

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        """As Sink.append."""
        num_bytes = sum(memoryview(frame).nbytes for frame in entry)
        with self._changed:
            self._queue.append((index, entry, num_bytes))
            self._num_bytes += num_bytes
            self._num_under_way += 1
            self._changed.notify()

    def begin_segment(self) -> None:
        """What is appended from now on goes to a new segment, which begins with a copy of the state."""
        self._do(self._folder.begin_segment)

    def end_copy(self) -> None:
        """The last piece of the copy was appended: the segments before this one are not needed once it is written."""
        self._do(self._folder.forget_before_last)

    def _do(self, run: Callable[[], int]) -> None:
        with self._changed:
            self._queue.append(run)
            self._num_under_way += 1
            self._changed.notify()

    def confirmed(self) -> int:
        """As Sink.confirmed."""
        return self._confirmed

    def trouble(self) -> str:
        """As Sink.trouble."""
        if self._threads.error is not None:
            return f"The log in {self._folder.path} cannot be written: {self._threads.error}."
        if self._num_bytes > MAX_BEHIND:
            return f"The disk of {self._folder.path} is {self._num_bytes:,} bytes behind."
        return self._trouble

    @property
    def is_idle(self) -> bool:
        """Whether everything that was appended is written."""
        return not self._num_under_way

    def has_room(self) -> bool:
        """Whether pieces of the state may be appended: not while changes wait."""
        return self._num_bytes < COPY_BEHIND and not self.trouble()

    def close(self) -> None:
        """As Sink.close; waits for the disk, unless that takes nothing."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._threads.join()

    def _run(self) -> None:
        while True:
            batch = self._next()
            if batch:
                self._write(batch)
                with self._changed:
                    self._num_bytes -= sum(item[2] for item in batch if isinstance(item, tuple))
                    self._num_under_way -= len(batch)
            is_due = time.monotonic() >= self._synced_at + self._fsync_seconds
            if self._is_dirty and (is_due or self._is_over):
                self._sync()
            if batch:
                last = next((item[0] for item in reversed(batch) if isinstance(item, tuple)), self._confirmed)
                self._confirmed = max(self._confirmed, last)
                self._wake()
            elif self._is_over and not self._queue:
                return

    def _next(self) -> list[Waiting]:
        """All that waits; nothing, if it is time to sync, or over."""
        with self._changed:
            if not self._queue and not self._is_over:
                pause = self._synced_at + self._fsync_seconds - time.monotonic() if self._is_dirty else None
                if pause is None or pause > 0:
                    self._changed.wait(pause)
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _write(self, batch: Sequence[Waiting]) -> None:
        buffers: list[Frame] = []
        for item in batch:
            if not isinstance(item, tuple):
                self._bring(buffers)
                buffers, self.segment_bytes = [], self._attempt(item)
            else:
                buffers += record_of(item[1])
                if len(buffers) >= _MAX_BUFFERS:
                    self._bring(buffers)
                    buffers = []
        self._bring(buffers)

    def _bring(self, buffers: Sequence[Frame]) -> None:
        if buffers:
            self.segment_bytes = self._attempt(lambda: self._folder.write(buffers))
            self._is_dirty = True

    def _sync(self) -> None:
        self._folder.sync()  # an error is the end: what the system had is not known any longer
        self._synced_at, self._is_dirty = time.monotonic(), False

    def _attempt(self, run: Callable[[], int]) -> int:
        """Again and again while the disk is full or may not be written: nothing that was appended is given up."""
        while True:
            try:
                done = run()
            except OSError as error:
                if error.errno not in _CURABLE:
                    raise
                self._trouble = (
                    f"The log in {self._folder.path} cannot be written ({os.strerror(error.errno or 0)}), and changes "
                    "that are not in it cannot be promised."
                )
                if self._is_over:
                    raise
                with contextlib.suppress(OSError):
                    self._wake()
                time.sleep(_PAUSE)
            else:
                self._trouble = ""
                return done
