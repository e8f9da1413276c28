"""Writes entries to a file in a background thread, so that the server's loop never waits for a disk."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torchfleet.base.background import BackgroundThreads
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_folder import LogFolder
from torchfleet.ps.server.log.log_records import record_of

MAX_BEHIND = 1 << 28  # bytes that wait for the disk; with more no change is taken
COPY_BEHIND = 1 << 24  # the same for pieces of the state: changes go first
_TOGETHER = 1 << 20  # bytes of entries that are written together, if the server has more to do before it rests
_PUT_OFF = 0.002  # seconds for which they may wait for each other
_PAUSE = 0.5  # seconds between two attempts on a disk that takes nothing
_MAX_BUFFERS = 512  # of one call
_CURABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

Waiting = tuple[int, Sequence[Frame], int] | Callable[[], int]  # an entry and its bytes, or something to be done


class LogWriter:
    """A Sink: the segment of a folder that is written now.

    With `fsync_ms` 0 an entry is confirmed when it is on the disk. Otherwise it is confirmed when the kernel has it,
    and is synced within `fsync_ms` milliseconds: a killed server loses nothing, and a machine that loses power loses
    the entries confirmed in that time.
    """

    def __init__(self, folder: LogFolder, index: int, fsync_ms: float, wake: Callable[[], None]) -> None:
        """`index`: of the last entry in the folder. `wake` is called, by the thread, when more is confirmed."""
        self._folder, self._fsync_seconds, self._wake = folder, fsync_ms / 1000, wake
        self._confirmed, self._trouble = index, ""
        self._queue: deque[Waiting] = deque()
        # Each is changed by one thread, the loop's or the log's, so that they need no lock.
        self._bytes_appended = self._bytes_done = 0
        self._num_appended = self._num_done = 0  # entries and other things
        self._changed = threading.Condition()
        self._waits_since: float | None = None  # entries wait of which the thread was not told
        self._bytes_told = 0  # of those of which it was told
        self._is_over = False
        self.segment_bytes = folder.num_bytes  # of the segment that is written
        self._synced_at, self._is_dirty = time.monotonic(), False
        self._threads = BackgroundThreads([self._run], "the log")
        self._threads.start()

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        """As Sink.append."""
        num_bytes = sum([memoryview(frame).nbytes for frame in entry])
        self._bytes_appended += num_bytes
        self._num_appended += 1
        self._queue.append((index, entry, num_bytes))
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since > _PUT_OFF or self._bytes_appended - self._bytes_told > _TOGETHER:
            self.flush()

    def flush(self) -> None:
        """As Sink.flush: tell the thread of entries. Waking it for each costs as much as writing one."""
        if self._waits_since is not None:
            self._waits_since, self._bytes_told = None, self._bytes_appended
            with self._changed:
                self._changed.notify()

    def begin_segment(self) -> None:
        """What is appended from now on goes to a new segment, which begins with a copy of the state."""
        self._put(self._folder.begin_segment)

    def end_copy(self) -> None:
        """The last piece of the copy was appended: the segments before this one are not needed once it is written."""
        self._put(self._folder.forget_before_last)

    def _put(self, run: Callable[[], int]) -> None:
        self._num_appended += 1
        self._queue.append(run)
        self._waits_since = time.monotonic()
        self.flush()

    def confirmed(self) -> int:
        """As Sink.confirmed."""
        return self._confirmed

    def trouble(self) -> str:
        """As Sink.trouble."""
        if self._threads.error is not None:
            return f"The log in {self._folder.path} cannot be written: {self._threads.error}."
        num_behind = self._bytes_appended - self._bytes_done
        return self._trouble if num_behind <= MAX_BEHIND else f"The disk is {num_behind:,} bytes behind the log."

    @property
    def is_idle(self) -> bool:
        """Whether everything that was appended is written."""
        return self._num_done == self._num_appended

    def has_room(self) -> bool:
        """Whether pieces of the state may be appended: not while changes wait."""
        return self._bytes_appended - self._bytes_done < COPY_BEHIND and not self.trouble()

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
            is_due = time.monotonic() >= self._synced_at + self._fsync_seconds
            if self._is_dirty and (is_due or self._is_over):
                self._sync()
            if batch:
                entries = [item for item in batch if isinstance(item, tuple)]
                self._bytes_done += sum(item[2] for item in entries)
                self._num_done += len(batch)
                if entries:
                    self._confirmed = entries[-1][0]
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
        return [self._queue.popleft() for _ in range(len(self._queue))]

    def _write(self, batch: Sequence[Waiting]) -> None:
        buffers: list[Frame] = []
        for item in batch:
            if not isinstance(item, tuple):
                self._bring(buffers)
                buffers, self.segment_bytes = [], self._attempt(item)
            else:
                buffers += record_of(item[1], self._folder.num_synced)
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
