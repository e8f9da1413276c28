"""The log of a replica. A backup has an entry in its own log before it confirms it, so each replica can be restored.

The primary's messages, in the order in which they come, are a segment of a log: a copy of the state in pieces, with
entries between them. Until a view names the backup, its log says NOT_IN_STEP.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from torchfleet.base.errors import LogError, SecurityError
from torchfleet.base.ownership import make_own
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.durable_server import Durability, DurableServer, begin_log, go_on, most_bytes
from torchfleet.ps.server.log.log_entry import Entry, Kind, encode_entry
from torchfleet.ps.server.log.log_folder import LogFolder
from torchfleet.ps.server.log.log_start import NOT_IN_STEP, Start, find_start
from torchfleet.ps.server.log.log_writer import LogWriter
from torchfleet.ps.server.log.newest_log import is_newest, log_in_step
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.log.state_copy import export_state
from torchfleet.ps.server.server import Server


class ReplicaLog:
    """Only the server's loop calls it."""

    def __init__(self, durability: Durability, replica: int, clock: Callable[[], float]) -> None:
        self._durability, self._replica, self._clock = durability, replica, clock
        self._folder: LogFolder | None = None  # of a backup
        self._writer: LogWriter | None = None
        self._failure = ""
        self._noted = NOT_IN_STEP  # the term that the writer was given
        self._most_bytes = 0  # size of the segment at which the log is cut; 0: the first copy is not whole yet
        self._pieces: Iterator[list[Frame]] | None = None  # of the copy that a new segment begins with
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def is_whole(self) -> bool:
        """Whether this replica has a log with a whole copy of its state. Raises LogError if it cannot be read."""
        start = find_start(self._durability.folder)
        return start is not None and start.is_whole

    @property
    def is_any_in_step(self) -> bool:
        """Whether a new run can go on from the log of this replica or of the other one, as far as the folders are here.
        Raises LogError."""
        folders = self._durability.folder, self._durability.other
        return any(folder is not None and log_in_step(folder) is not None for folder in folders)

    def make_folder(self) -> None:
        """Make the folder of this replica, although there is no log that a run can go on from. The other replica, if it
        sees the folder, then knows that no log is missing. Raises LogError."""
        try:
            make_own(self._durability.folder)
        except (OSError, SecurityError) as error:
            raise LogError(f"no log can be kept in {self._durability.folder}: {error}. Give another folder.") from None

    @property
    def is_newest(self) -> bool:
        """Whether a run without a primary goes on from this log. Raises LogError."""
        return is_newest(self._durability, self._replica == 0)

    def restore(self, server: Server) -> DurableServer:
        """Restore a server from the log. Blocks. Raises LogError."""
        found = go_on(server, self._durability, server.state.say, self._clock)
        if found is None:
            raise LogError(f"{self._durability.folder}: expected the log of this server, found none")
        return found

    def begin_primary(self, server: Server, term: int) -> DurableServer:
        """Begin a log with the state of the server, which is primary in `term`. Blocks. Raises LogError."""
        self._remove(lambda start: start.term == NOT_IN_STEP)
        return begin_log(server, self._durability, term, self._clock)

    def begin_backup(self) -> None:
        """Remove the log of an earlier process, which the primary does not need, and begin one without a state. If that
        fails, `check` says so."""
        try:
            self._remove(lambda start: True)
            self._folder = folder = LogFolder(self._durability.folder)
            folder.begin(self._durability.run, NOT_IN_STEP)
        except LogError as error:
            self._failure = str(error)
            return
        self._writer = LogWriter(folder, 0, self._durability.fsync_ms, self._ring)
        self._writer.begin_segment()

    def append(self, number: int, entry: Sequence[Frame]) -> None:
        """Append an entry or a piece of the state, which has this number among the primary's messages."""
        if self._writer is not None:
            self._writer.append(number, entry)

    @property
    def confirmed(self) -> int:
        """The highest number up to which all messages are in the log."""
        return 0 if self._writer is None else self._writer.confirmed()

    @property
    def is_stuck(self) -> bool:
        """Whether no entry can be written now, because the disk is full or read-only."""
        return self._writer is not None and self._writer.is_stuck

    def end_copy(self) -> None:
        """All pieces of the state were appended."""
        if self._writer is not None:
            self._writer.end_copy()
            self._most_bytes = most_bytes(self._writer.segment_bytes)

    @property
    def has_copy(self) -> bool:
        """Whether all pieces of the state were appended."""
        return bool(self._most_bytes)

    def note(self, term: int) -> None:
        """A view of this term names the backup."""
        if self._writer is not None and term > self._noted:
            self._noted = term
            self._writer.note_term(term)

    def flush(self) -> None:
        """As Sink.flush."""
        if self._writer is not None:
            self._writer.flush()

    def check(self) -> None:
        """Raise LogError if the log cannot be written any longer."""
        failure = self._failure or (self._writer.failure if self._writer is not None else "")
        if failure:
            raise LogError(f"{failure} This backup ends.")

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes: readable when `confirmed` may have grown."""
        return (self._bell,)

    def hear(self) -> None:
        """Reset the event that `wakes` returns."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def is_cut_due(self) -> bool:
        """Whether `cut` has something to do, and room for it."""
        writer = self._writer
        if writer is None or not self._most_bytes or not writer.has_room():
            return False
        return self._pieces is not None or writer.segment_bytes > self._most_bytes

    def cut(self, replay: Replay, number: int) -> None:
        """Append one more piece of a copy of the state; the first one begins a new segment. `replay` must have applied
        all messages that were appended, up to `number`."""
        assert self._writer is not None
        if self._pieces is None:
            self._writer.begin_segment()
            self._pieces = export_state(replay.server, replay.index)
        piece = next(self._pieces, None)
        if piece is None:
            self._pieces = None
            self.end_copy()
            return
        entry = Entry(Kind.PIECE, replay.index, replay.term, time=replay.time, frames=piece)
        self._writer.append(number, encode_entry(entry))

    def take_over(self, server: Server, replay: Replay, number: int) -> DurableServer:
        """The backup is primary now, and goes on with its log. `replay` has applied all messages, up to `number`.
        Raises LogError."""
        assert self._folder is not None
        assert self._writer is not None
        self.check()
        folder, writer, self._folder, self._writer = self._folder, self._writer, None, None
        made = DurableServer(server, folder, self._durability.fsync_ms, replay, clock=self._clock, writer=writer)
        writer.go_on_for(replay.index - number, made.wake)  # since the last piece, each message is an entry
        return made

    def close(self, is_over: bool = False) -> None:
        """Write all entries of a backup, and close its log. `is_over`: the job has ended, so the log is removed, also
        one of an earlier process. Raises LogError."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        os.close(self._bell)
        if is_over:
            self._remove(lambda start: True)

    def _remove(self, is_meant: Callable[[Start], bool]) -> None:
        """Remove the log of this replica, if there is one and `is_meant` is True for it. Raises LogError."""
        start = find_start(self._durability.folder)
        if start is not None and is_meant(start):
            folder = LogFolder(self._durability.folder)
            try:
                folder.open()
                folder.remove()
            finally:
                folder.close()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)
