"""Planted bugs of logs, and of what a server hands on to the one that takes its place. See planted.py."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

from support.faults.planted import Patch, bug

from torchfleet.net.wire import Command
from torchfleet.server.log import log_folder, log_records, logged_server, state_copy
from torchfleet.server.log.durable_server import DurableServer
from torchfleet.server.log.journal import Journal
from torchfleet.server.log.log_folder import LogFolder
from torchfleet.server.log.log_writer import LogWriter
from torchfleet.server.log.logged_server import LoggedServer
from torchfleet.server.log.replay import Replay
from torchfleet.server.log.state_copy import StateImport
from torchfleet.server.meeting.file_lists import FileLists
from torchfleet.server.meeting.gathering import Gatherings
from torchfleet.server.meeting.mail import Mail
from torchfleet.server.state.changes import Changes
from torchfleet.server.state.schedule import Schedule
from torchfleet.server.state.sessions import Sessions
from torchfleet.tables.settings.clock import Clock

LOG = ("logged",)
BOTH = ("logged", "replicas")


@bug("log: replies leave before their entries are safe", BOTH)
def _(patch: Patch) -> None:
    patch(LoggedServer, "confirmed", property(lambda self: self.index))


@bug("log: an entry is confirmed when it is appended", LOG)
def _(patch: Patch) -> None:
    append = LogWriter.append

    def append_and_confirm(self: LogWriter, index: int, entry: Any) -> None:
        append(self, index, entry)
        self._confirmed = index

    patch(LogWriter, "append", append_and_confirm)


@bug("log: nothing is synced", LOG)
def _(patch: Patch) -> None:
    def no_sync(self: LogWriter) -> None:
        self._is_dirty = False

    patch(LogWriter, "_sync", no_sync)


@bug("log: an entry is confirmed when it is written, before it is synced", LOG)
def _(patch: Patch) -> None:
    write = LogWriter._write

    def write_and_confirm(self: LogWriter, batch: Any) -> None:
        write(self, batch)
        self._confirmed = max([self._confirmed, *(item[0] for item in batch if isinstance(item, tuple))])
        self._wake()

    patch(LogWriter, "_write", write_and_confirm)


@bug("log: a torn record is filled up with zeros", LOG)
def _(patch: Patch) -> None:
    init = log_records.Records.__init__

    def filled(self: Any, data: memoryview, place: str) -> None:
        init(self, memoryview(bytes(data) + bytes(4096)), place)

    patch(log_records.Records, "__init__", filled)


@bug("log: what was torn is not cut off, and records come behind it", LOG)
def _(patch: Patch) -> None:
    entries = LogFolder.entries

    def without_cut(self: LogFolder) -> Iterator[Any]:
        sizes = {path: path.stat().st_size for path in self.path.glob("segment-*")}
        yield from entries(self)
        if self._file >= 0:
            path = os.readlink(f"/proc/self/fd/{self._file}")
            self.num_bytes = next(size for known, size in sizes.items() if str(known) == path)
            os.ftruncate(self._file, self.num_bytes)

    patch(LogFolder, "entries", without_cut)


@bug("log: checksums are not looked at", LOG)
def _(patch: Patch) -> None:
    class NoChecks:
        crc32 = staticmethod(lambda data, start=0: 0)

    patch(log_records, "zlib", NoChecks)


@bug("log: checksums are made without the content", LOG)
def _(patch: Patch) -> None:
    class FewChecks:
        crc32 = staticmethod(lambda data, start=0: zlib.crc32(bytes(data)[:16], start) if len(data) < 24 else 7)

    patch(log_records, "zlib", FewChecks)


@bug("log: the last entry is left out when it is read", LOG)
def _(patch: Patch) -> None:
    entries = LogFolder.entries

    def all_but_last(self: LogFolder) -> Iterator[Any]:
        yield from list(entries(self))[:-1]

    patch(LogFolder, "entries", all_but_last)


@bug("log: a full disk is passed over", LOG)
def _(patch: Patch) -> None:
    def once(self: LogWriter, run: Any) -> int:
        try:
            return int(run())
        except OSError:
            return self.segment_bytes

    patch(LogWriter, "_attempt", once)


@bug("log: old segments are removed before the new copy is whole", LOG)
def _(patch: Patch) -> None:
    cut = DurableServer._cut

    def cut_and_forget(self: DurableServer) -> None:
        cut(self)
        self._writer.end_copy()

    patch(DurableServer, "_cut", cut_and_forget)


@bug("log: entries are not made while a copy is under way", LOG)
def _(patch: Patch) -> None:
    append = LogWriter.append

    def only_pieces(self: LogWriter, index: int, entry: Any) -> None:
        self._confirmed = max(self._confirmed, 0)
        if index % 7:  # some of them
            append(self, index, entry)
        else:
            self._confirmed = index

    patch(LogWriter, "append", only_pieces)


@bug("log: the index begins anew after a restart", LOG)
def _(patch: Patch) -> None:
    init = LoggedServer.__init__

    def from_zero(self: LoggedServer, server: Any, sinks: Any, index: int = 0, *more: Any) -> None:
        init(self, server, sinks, 0, *more)

    patch(LoggedServer, "__init__", from_zero)


@bug("log: pulls that count are not noted", BOTH, "tokens")
def _(patch: Patch) -> None:
    is_change = Journal._is_change
    patch(
        Journal,
        "_is_change",
        lambda self, request: request.message.command != Command.PULL and is_change(self, request),
    )


@bug("log: setting the clock is not noted", BOTH, "policies")
def _(patch: Patch) -> None:
    _leave_out(patch, Command.CLOCK)


@bug("log: requests about files are not noted", BOTH, "meetings")
def _(patch: Patch) -> None:
    _leave_out(patch, Command.FILES)


@bug("log: parcels are not noted", BOTH, "meetings")
def _(patch: Patch) -> None:
    _leave_out(patch, Command.SEND)


@bug("log: new tables are not noted", BOTH)
def _(patch: Patch) -> None:
    _leave_out(patch, Command.CREATE_TABLE)


@bug("log: rows that are erased are not noted", BOTH, "tokens")
def _(patch: Patch) -> None:
    _leave_out(patch, Command.ERASE)


def _leave_out(patch: Patch, command: Command) -> None:
    is_change = Journal._is_change
    patch(Journal, "_is_change", lambda self, request: request.message.command != command and is_change(self, request))


@bug("log: slices of long work are not noted", BOTH, "policies")
def _(patch: Patch) -> None:
    patch(Journal, "work", lambda self, run: run())


@bug("replay: the clock is read while entries are applied", BOTH, "tokens")
def _(patch: Patch) -> None:
    apply = Replay._apply

    def with_own_clock(self: Replay, entry: Any) -> None:
        entry.wall = self.server.state.clock.measured() if entry.wall else 0
        apply(self, entry)

    patch(Replay, "_apply", with_own_clock)


@bug("replay: what was decided is decided anew", BOTH, "policies")
def _(patch: Patch) -> None:
    patch(Replay, "_follow", lambda self, effects: None)


@bug("replay: the time of the server before is not continued", ("replicas",))
def _(patch: Patch) -> None:
    init = LoggedServer.__init__

    def with_own_time(self: Any, server: Any, sinks: Any, index: int = 0, term: int = 0, _: Any = None, *m: Any) -> None:
        init(self, server, sinks, index, term, None, *m)

    patch(LoggedServer, "__init__", with_own_time)


@bug("copy: sessions are left out", BOTH, "tokens")
def _(patch: Patch) -> None:
    patch(Sessions, "restore", lambda self, kept: None)


@bug("copy: floors of sessions are lost", BOTH, "tokens")
def _(patch: Patch) -> None:
    restore = Sessions.restore
    patch(Sessions, "restore", lambda self, kept: restore(self, [[*one[:4], 1, *one[5:]] for one in kept]))


@bug("copy: outcomes of sessions are lost", BOTH, "tokens")
def _(patch: Patch) -> None:
    restore = Sessions.restore
    patch(Sessions, "restore", lambda self, kept: restore(self, [[*one[:6], []] for one in kept]))


@bug("copy: replies of gathers are left out", BOTH, "meetings")
def _(patch: Patch) -> None:
    patch(Gatherings, "restore", lambda self, kept: None)


@bug("copy: lists of files are left out", BOTH, "meetings")
def _(patch: Patch) -> None:
    patch(FileLists, "restore", lambda self, kept: None)


@bug("copy: parcels are left out", BOTH, "meetings")
def _(patch: Patch) -> None:
    patch(Mail, "restore", lambda self, kept: None)


@bug("copy: changes for other workers of geo are left out", BOTH, "geo")
def _(patch: Patch) -> None:
    patch(Changes, "restore", lambda self, kept: None)


@bug("copy: when tables are due to shrink is left out", BOTH, "policies")
def _(patch: Patch) -> None:
    patch(Schedule, "restore", lambda self, kept: None)


@bug("copy: the time that a job has set is left out", BOTH, "policies")
def _(patch: Patch) -> None:
    patch(Clock, "given", None)


@bug("copy: pushes that wait to be gathered are left out", BOTH, "policies")
def _(patch: Patch) -> None:
    _change_body(patch, "gathered", [])


@bug("copy: results of long requests are left out", BOTH, "policies")
def _(patch: Patch) -> None:
    _change_body(patch, "long_requests", {})


def _change_body(patch: Patch, name: str, value: Any) -> None:
    body = state_copy._body

    def changed(server: Any) -> Any:
        made = body(server)
        setattr(made, name, value)
        return made

    patch(state_copy, "_body", changed)


@bug("copy: steps of tables are left out", BOTH, "tokens")
def _(patch: Patch) -> None:
    patch(state_copy, "restore_notes", lambda table, notes: None)


@bug("copy: the server is another one to its clients", BOTH)
def _(patch: Patch) -> None:
    take = StateImport._take_state

    def with_own_number(self: StateImport, head: Any, body: Any) -> None:
        body.incarnation = self._server.incarnation
        take(self, head, body)

    patch(StateImport, "_take_state", with_own_number)


@bug("copy: the last slice of rows is left out", BOTH)
def _(patch: Patch) -> None:
    export = logged_server.export_state

    def without_last(server: Any, copy: int) -> Iterator[Any]:
        pieces = list(export(server, copy))
        yield from (piece for i, piece in enumerate(pieces) if len(pieces) < 3 or i != len(pieces) - 2)

    patch(logged_server, "export_state", without_last)


assert log_folder is not None
