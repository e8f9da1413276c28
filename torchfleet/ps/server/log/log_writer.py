"""Writes entries to a file in a background thread, so that the server's loop does not wait for the disk.

The thread writes a large entry as soon as it comes, because replies wait for it; entries that come meanwhile are its
next batch. Small entries take less time to write than the thread takes to wake up, so they are put off for a moment. A
second thread syncs the file while the first one writes, unless every reply waits for the sync. A third one removes old
segments.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from torchfleet.base.background import BackgroundThreads
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_folder import LogFolder
from torchfleet.ps.server.log.log_records import record_of

MAX_BEHIND = 1 << 28  # bytes that may wait for the disk; while more wait, no change is accepted
COPY_BEHIND = 1 << 24  # bytes that may wait before no more pieces of the state are appended: changes go first
_AT_ONCE = 1 << 16  # bytes of new entries with which `append` gives them to the thread at once
_PAUSE = 0.5  # seconds between two attempts to write to a full or read-only disk
_MAX_BUFFERS = 512  # buffers of records that are gathered for one write
_CURABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

# An entry (index, frames, bytes), or a function to call.
Waiting = tuple[int, Sequence[Frame], int] | Callable[[], None]


class LogWriter:
    """A Sink that writes entries to the last segment of a folder.

    With `fsync_ms` 0 an entry is confirmed when it is on the disk. Otherwise it is confirmed when the kernel has it,
    and is synced within about `fsync_ms` milliseconds: a killed server loses no confirmed entry, and a machine that
    loses power loses those of the last `fsync_ms` milliseconds.
    """

    def __init__(self, folder: LogFolder, index: int, fsync_ms: float, wake: Callable[[], None]) -> None:
        """`index`: that of the last entry in the folder. `wake`: the thread calls it after a batch, and on trouble."""
        self._folder, self._fsync_seconds, self._wake = folder, fsync_ms / 1000, wake
        self._confirmed, self._trouble = index, ""
        self._shift = 0  # callers' indexes minus those of the log; see `go_on_for`
        self._put_off: list[Waiting] = []  # items that the thread was not given yet
        self._put_off_bytes, self._put_off_since = 0, 0.0
        self._queue: queue.SimpleQueue[list[Waiting] | None] = queue.SimpleQueue()  # None: the writer is closed
        # Only one thread changes each of these counters, the server's loop or the log's thread: they need no lock.
        self._bytes_appended = self._bytes_done = 0
        self._num_appended = self._num_done = 0  # entries and functions
        self._is_over = False
        self.segment_bytes = folder.num_bytes  # bytes of the last segment, also those that wait to be written
        self._is_syncing = True  # until `close`
        self._is_dirty = False  # whether bytes were written since the last sync began
        self._due = threading.Condition()  # notified when `_is_dirty` becomes True, and at `close`
        self._threads = BackgroundThreads([self._run], "the log")
        self._threads.start()
        self._syncing = BackgroundThreads([self._sync_behind], "the log")
        self._removing = BackgroundThreads([self._remove_old], "the log")  # a new one for each removal
        if self._fsync_seconds:
            self._syncing.start()

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        """As Sink.append."""
        num_bytes = sum([memoryview(frame).nbytes for frame in entry])
        self._bytes_appended += num_bytes
        self.segment_bytes += num_bytes
        self._num_appended += 1
        if not self._put_off:
            self._put_off_since = time.monotonic()
        self._put_off.append((index - self._shift, entry, num_bytes))
        self._put_off_bytes += num_bytes
        if self._put_off_bytes >= _AT_ONCE:
            self.flush()

    def flush(self, after: float = 0.0) -> None:
        """As Sink.flush: give new entries to the thread. Wakes it if it sleeps; else it finds them by itself."""
        if self._put_off and (not after or time.monotonic() - self._put_off_since >= after):
            new, self._put_off, self._put_off_bytes = self._put_off, [], 0
            self._queue.put(new)

    def go_on_for(self, shift: int, wake: Callable[[], None]) -> None:
        """The backup that owns this log becomes primary. From now on a caller's index is that of the log, which counts
        the backup's messages, plus `shift`; and the threads call `wake`."""
        self._shift, self._wake = shift, wake

    def begin_segment(self) -> None:
        """Write all later entries to a new segment. The caller appends a copy of the state next. Does not block."""
        self.segment_bytes = 0
        self._put(self._folder.begin_segment)

    def end_copy(self) -> None:
        """Remove the earlier segments once all appended pieces of the copy are written. Does not block."""
        self._put(self._forget)

    def note_term(self, term: int) -> None:
        """Write the term into the folder's `start`, before all later entries. Does not block; see `term`."""
        self._put(lambda: self._folder.note_term(term))

    @property
    def term(self) -> int:
        """The term that `start` has on the disk."""
        return self._folder.term

    def _put(self, run: Callable[[], None]) -> None:
        self._num_appended += 1
        self._put_off.append(run)
        self.flush()

    def confirmed(self) -> int:
        """As Sink.confirmed."""
        return self._confirmed + self._shift

    @property
    def failure(self) -> str:
        """Why the log can no longer be written; empty if it can."""
        error = self._threads.error or self._syncing.error or self._removing.error
        return "" if error is None else f"The log in {self._folder.path} cannot be written: {error}."

    def trouble(self) -> str:
        """As Sink.trouble."""
        if failure := self.failure:
            return failure
        num_behind = self._bytes_appended - self._bytes_done
        return self._trouble if num_behind <= MAX_BEHIND else f"The disk is {num_behind:,} bytes behind the log."

    @property
    def is_stuck(self) -> bool:
        """Whether the disk is full or read-only now. Writing goes on when that is over."""
        return bool(self._trouble)

    @property
    def is_idle(self) -> bool:
        """Whether the thread has written and confirmed all entries and called all functions in the queue."""
        return self._num_done == self._num_appended

    def has_room(self) -> bool:
        """Whether a piece of the state may be appended: fewer than COPY_BEHIND bytes wait, and there is no trouble."""
        return self._bytes_appended - self._bytes_done < COPY_BEHIND and not self.trouble()

    def close(self) -> None:
        """As Sink.close. Blocks until all entries are written and synced, or a write fails. The folder stays open."""
        with self._due:
            self._is_syncing = False
            self._due.notify()
        if self._fsync_seconds:
            self._syncing.join()
        self.flush()
        self._is_over = True  # only now: the log's thread then syncs, and ends
        self._queue.put(None)
        self._threads.join()
        self._removing.join()

    def _run(self) -> None:
        while True:
            batch = self._next()
            if batch:
                self._write(batch)
            if self._syncing.error is not None:
                return  # what was written since the last sync may be lost, so nothing more is confirmed
            if self._is_dirty and not self._fsync_seconds:
                self._is_dirty = False
                self._folder.sync()
            if batch:
                entries = [item for item in batch if isinstance(item, tuple)]
                if entries:
                    self._confirmed = entries[-1][0]
                self._bytes_done += sum(item[2] for item in entries)
                self._num_done += len(batch)  # last: if the writer is idle, all is confirmed
                self._wake()
            elif self._is_over and self._queue.empty():
                self._folder.sync()
                return

    def _sync_behind(self) -> None:
        """Sync what was written, at most every `fsync_ms` milliseconds. An error ends the thread: it is then unknown
        which writes the kernel has dropped."""
        while self._is_syncing:
            with self._due:
                if self._is_syncing and not self._is_dirty:
                    self._due.wait()
            if self._is_dirty:
                self._is_dirty = False
                self._folder.sync_behind()
            next_sync = time.monotonic() + self._fsync_seconds
            with self._due:
                while self._is_syncing and (rest := next_sync - time.monotonic()) > 0:
                    self._due.wait(rest)

    def _forget(self) -> None:
        """Note that the earlier segments are not needed, and remove them: in another thread, so that no reply waits for
        it, unless `fsync_ms` is 0. Raises OSError."""
        self._folder.forget_before_last()
        if not self._fsync_seconds:
            self._folder.remove_forgotten()
        else:
            self._removing.join()  # the previous removal, which was long ago
            self._removing = BackgroundThreads([self._remove_old], "the log")
            self._removing.start()

    def _remove_old(self) -> None:
        try:
            self._folder.remove_forgotten()
        except OSError as error:
            if error.errno not in _CURABLE:
                raise  # otherwise the next removal takes them, too

    def _next(self) -> list[Waiting]:
        """Block until items wait, or the writer is closed. Returns all items that wait, in order."""
        found = [] if self._is_over and self._queue.empty() else [self._queue.get()]
        found += [self._queue.get() for _ in range(self._queue.qsize())]  # no other thread takes any
        return [item for new in found if new is not None for item in new]

    def _write(self, batch: Sequence[Waiting]) -> None:
        buffers: list[Frame] = []
        for item in batch:
            if not isinstance(item, tuple):
                self._bring(buffers)
                buffers = []
                self._attempt(item)
            else:
                buffers += record_of(item[1], self._folder.num_synced, self._folder.salt)
                if len(buffers) >= _MAX_BUFFERS:
                    self._bring(buffers)
                    buffers = []
        self._bring(buffers)

    def _bring(self, buffers: Sequence[Frame]) -> None:
        if buffers:
            self._attempt(lambda: self._folder.write(buffers))
            if not self._is_dirty:
                self._is_dirty = True
                if self._fsync_seconds:
                    with self._due:
                        self._due.notify()

    def _attempt(self, run: Callable[[], None]) -> None:
        """Call `run` until it succeeds. Raises OSError if the cause is not a full or read-only disk, also SyncFailed,
        and if the writer is closed or the other thread has failed."""
        while True:
            try:
                run()
            except OSError as error:
                if error.errno not in _CURABLE:
                    raise
                self._trouble = (
                    f"The log in {self._folder.path} cannot be written ({os.strerror(error.errno or 0)}), and changes "
                    "that are not in it cannot be promised."
                )
                if self._is_over or self._syncing.error is not None:
                    raise
                with contextlib.suppress(OSError):
                    self._wake()
                time.sleep(_PAUSE)
            else:
                self._trouble = ""
                return
