"""Planted bugs of logs, and of those who apply entries again. See planted.py."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from typing import Any

from support.faults.planted import Patch, bug

from torchfleet.ps.net.wire import Command
from torchfleet.ps.server.log import log_records
from torchfleet.ps.server.log.durable_server import DurableServer
from torchfleet.ps.server.log.journal import Journal
from torchfleet.ps.server.log.log_files import SyncFailed
from torchfleet.ps.server.log.log_folder import LogFolder
from torchfleet.ps.server.log.log_writer import LogWriter
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay

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
    patch(LogFolder, "sync", lambda self: None)
    patch(LogFolder, "sync_behind", lambda self: None)


@bug("log: a sync that has failed is repeated", LOG, is_unlucky=True)
def _(patch: Patch) -> None:
    sync = LogFolder._sync

    def sync_again(self: LogFolder, file: int) -> None:
        try:
            sync(self, file)
        except SyncFailed:
            sync(self, file)

    patch(LogFolder, "_sync", sync_again)


@bug("log: an entry is confirmed when it is written, before it is synced", LOG, is_unlucky=True)
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

    def filled(self: Any, data: memoryview, place: str, is_synced: bool = False, salt: int = 0) -> None:
        init(self, memoryview(bytes(data) + bytes(4096)), place, is_synced, salt)

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
    patch(log_records, "crc32c", lambda data, crc=0: 0)


@bug("log: checksums are made without the content", LOG)
def _(patch: Patch) -> None:
    patch(log_records, "crc32c", lambda data, crc=0: zlib.crc32(bytes(data)[:16], crc) if len(data) < 32 else 7)


@bug("log: the last entry is left out when it is read", LOG)
def _(patch: Patch) -> None:
    entries = LogFolder.entries

    def all_but_last(self: LogFolder) -> Iterator[Any]:
        yield from list(entries(self))[:-1]

    patch(LogFolder, "entries", all_but_last)


@bug("log: a full disk is passed over", LOG)
def _(patch: Patch) -> None:
    def once(self: LogWriter, run: Any) -> None:
        with contextlib.suppress(OSError):
            run()

    patch(LogWriter, "_attempt", once)


@bug("log: old segments are removed before the new copy is whole", LOG)
def _(patch: Patch) -> None:
    cut = DurableServer._cut

    def cut_and_forget(self: DurableServer) -> None:
        cut(self)
        self._writer.end_copy()

    patch(DurableServer, "_cut", cut_and_forget)


@bug("log: an entry now and then is confirmed and not written", LOG)
def _(patch: Patch) -> None:
    append = LogWriter.append

    def append_most(self: LogWriter, index: int, entry: Any) -> None:
        if index % 7 != 3:
            append(self, index, entry)
        else:
            self._confirmed = index

    patch(LogWriter, "append", append_most)


@bug("log: the index begins anew after a restart", LOG)
def _(patch: Patch) -> None:
    init = LoggedServer.__init__

    def from_zero(self: Any, server: Any, sinks: Any, index: int = 0, *more: Any, **named: Any) -> None:
        init(self, server, sinks, 0, *more, **named)

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

    def with_own_time(self: Any, server: Any, sinks: Any, *more: Any, **named: Any) -> None:
        init(self, server, sinks, *more, **named)
        self._offset = 0.0

    patch(LoggedServer, "__init__", with_own_time)
