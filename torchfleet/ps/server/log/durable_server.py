"""A server with a log on disk. A new process restores the server from the log. A log that has grown is cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchfleet.base.errors import FleetError, LogError
from torchfleet.ps.net.wire import MAX_BODY, unpack
from torchfleet.ps.server.arrays import only
from torchfleet.ps.server.kept_pushes import apply_gathered
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.log_folder import LogFolder
from torchfleet.ps.server.log.log_writer import LogWriter
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.meeting.meetings import Meetings
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.saves.table_saving import SaveBody
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.server_log import rows_text
from torchfleet.ps.server.state.state import Pushes, State

DEFAULT_FSYNC_MS = 10.0
MIN_GROWTH = 1 << 30  # bytes of entries behind the copy of the state, below which size is no reason to cut the log
_LOOK = 0.001  # seconds between two looks at the progress of the first copy


@dataclass(frozen=True)
class Durability:
    """Settings of a log: its folder, and within how many milliseconds written entries are synced to the disk."""

    folder: Path
    fsync_ms: float = DEFAULT_FSYNC_MS
    run: str = ""  # names the launcher's run; a server drops the workers of any other run
    other: Path | None = None  # folder of the log of the other replica, which this machine need not have

    def __post_init__(self) -> None:
        if not 0 <= self.fsync_ms < float("inf"):
            raise FleetError(f"fsync_ms must be a number of milliseconds, 0 for each time; found {self.fsync_ms}")


class DurableServer(LoggedServer):
    """A LoggedServer whose first sink is a log on disk. Owns the folder."""

    def __init__(
        self,
        server: Server,
        folder: LogFolder,
        fsync_ms: float,
        replay: Replay | None = None,
        begins: bool = False,
        clock: Callable[[], float] | None = None,
        writer: LogWriter | None = None,
    ) -> None:
        """`replay`: has applied all entries of `folder`; None: the folder is empty. `begins`: begin a new segment with
        the current state. With `begins`, or without `replay`, blocks until the copy is on disk. `clock`: as in
        LoggedServer. `writer`: the LogWriter that writes to `folder` already, if there is one. Raises LogError."""
        index, term = (0, 0) if replay is None else (replay.index, replay.term)
        timed = {} if clock is None else {"clock": clock}
        super().__init__(server, (), index, term, None if replay is None else replay.time, **timed)
        self._folder = folder
        self._writer = LogWriter(folder, index, fsync_ms, self.wake) if writer is None else writer
        self.add_sink(self._writer)
        self._attempt = server.state.saves.chain.attempt
        self._most_bytes = most_bytes(self._writer.segment_bytes)  # size of the segment at which the log is cut
        if replay is None or begins:
            self._cut()
            self._wait_for_copy()

    def lead(self, term: int) -> None:
        """As LoggedServer.lead. The log's thread notes the term."""
        super().lead(term)
        self._writer.note_term(term)

    @property
    def is_noted(self) -> bool:
        """As LoggedServer.is_noted."""
        return self._writer.term == self.term

    @property
    def noted_term(self) -> int:
        """The last term in which this server was primary, or the backup that the view names, as its log says."""
        return max(self._writer.term, self.term)

    def check(self) -> None:
        """As LoggedServer.check."""
        if failure := self._writer.failure:
            raise LogError(f"{failure} The server ends. Started again, it goes on from what is in the log.")

    def work(self) -> bool | None:
        """As Handler.work. Cuts the log when a full save has begun, or the segment exceeds `_most_bytes`."""
        if self._writer.segment_bytes > self._most_bytes or self.server.state.saves.chain.attempt != self._attempt:
            self._consider_cut()
        return super().work()

    def end(self, keeps_log: bool = False) -> None:
        """The process ends: close the log, and remove it if all workers have left. `keeps_log`: not then either,
        because the server was told to end."""
        self.close(self.is_stopping and not self.server.desertion and not keeps_log)

    def close(self, is_over: bool = False) -> None:
        """Write all entries and close the log. `is_over`: the job has ended, so the log is removed."""
        super().close()
        try:
            if is_over:
                self._folder.remove()
        finally:
            self._folder.close()

    def _cut(self) -> None:
        if not self.is_copying and not self._writer.trouble():
            self._writer.begin_segment()
            self.copy_to(self._writer.append, self._writer.has_room, self._end_copy)

    def _end_copy(self) -> None:
        self._writer.end_copy()
        self._most_bytes = most_bytes(self._writer.segment_bytes)

    def _wait_for_copy(self) -> None:
        """Block until the copy of the state is in the log: entries cannot be replayed without it. Raises LogError."""
        while self.is_copying or not self._writer.is_idle:
            if not self.work():
                self.rest()
                time.sleep(_LOOK)
            if trouble := self._writer.trouble():
                self.close()
                raise LogError(f"{trouble} The server does not begin without its log.")

    def _consider_cut(self) -> None:
        state = self.server.state
        is_new, self._attempt = state.saves.chain.attempt != self._attempt, state.saves.chain.attempt
        long = state.work.requests.get(self._attempt) if is_new else None
        is_full_save = long is not None and not unpack(only(long.request), SaveBody, MAX_BODY).delta
        if is_full_save or self._writer.segment_bytes > self._most_bytes:
            self._cut()


def most_bytes(copied: int) -> int:
    """The size in bytes at which a segment is cut. `copied`: bytes of the copy of the state at its beginning."""
    return copied + max(MIN_GROWTH, copied)


def go_on(
    server: Server,
    durability: Durability,
    say: Callable[[str], None],
    clock: Callable[[], float] | None = None,
) -> DurableServer | None:
    """Restore `server` from its log, and return it as a DurableServer; None if the log is empty.

    `server`: its tables must be empty; the log adds missing ones. `clock`: as in LoggedServer. Raises LogError if the
    log is unusable.
    """
    folder = LogFolder(durability.folder)
    try:
        if not folder.open():
            folder.close()
            return None
        started, replay = time.monotonic(), Replay(server)
        for frames in folder.entries():
            replay.apply(decode_entry(frames))
        replay.finish()
        is_other_run = folder.run != durability.run
        if is_other_run:
            forget_workers(server.state)
            folder.run = durability.run  # on the disk only with the copy that lacks these workers
    except LogError as error:
        folder.close()
        raise LogError(f"{folder.path}: {error}" if str(folder.path) not in str(error) else str(error)) from error
    except BaseException:
        folder.close()
        raise
    rows = rows_text(server.state.tables.values())
    say(f"went on from {folder.path}: {replay.index:,} entries, {rows}, in {time.monotonic() - started:.1f} s")
    return DurableServer(server, folder, durability.fsync_ms, replay, is_other_run, clock)


def forget_workers(state: State) -> None:
    """Drop workers, meetings and unfinished long requests, because the log is from another run. Rows stay, and sessions
    as those of clients that have left: late copies of their requests change nothing.

    The workers of this run start from these rows, as if the server had loaded a saved model.
    """
    apply_gathered(state)  # these pushes were acknowledged, so they must not be lost
    before = state.meetings.members
    members = Members(state.num_workers, before.min_workers, before.on_loss)
    state.meetings = Meetings(members, place=state.meetings.place)
    state.pushes = Pushes(num_dropped=state.pushes.num_dropped)
    state.sessions.end_all()
    state.work.slices.clear()
    state.work.requests = {token: long for token, long in state.work.requests.items() if long.result is not None}
    state.is_stopping = False
    for table in state.tables.values():
        table.begin_run()


def begin_log(
    server: Server, durability: Durability, term: int = 0, clock: Callable[[], float] | None = None
) -> DurableServer:
    """Begin a log with the current state of the server. Blocks until the state is on disk. `term`: as in Start.
    `clock`: as in LoggedServer. Raises LogError."""
    folder = LogFolder(durability.folder)
    try:
        folder.begin(durability.run, term)
    except BaseException:
        folder.close()
        raise
    return DurableServer(server, folder, durability.fsync_ms, clock=clock)
