"""Planted bugs of the files of a log, and of what begins and ends with them. See planted.py."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from support.faults.planted import Patch, bug

from torchfleet.ps.server.log import durable_server
from torchfleet.ps.server.log.durable_server import DurableServer
from torchfleet.ps.server.log.log_folder import LogFolder

LOG = ("logged",)


@bug("folder: a run is noted before its copy is on the disk", LOG, "meetings")
def _(patch: Patch) -> None:
    init = DurableServer.__init__

    def note_and_init(self: DurableServer, server: Any, folder: LogFolder, *more: Any, **named: Any) -> None:
        start = folder._start
        if start is not None and start.first:
            folder._note(replace(start, run=folder.run, term=0))
        init(self, server, folder, *more, **named)

    patch(DurableServer, "__init__", note_and_init)


@bug("folder: segments are removed before the file that names them", LOG)
def _(patch: Patch) -> None:
    remove = LogFolder.remove

    def remove_segments_first(self: LogFolder) -> None:
        self._unlink(self._all())
        remove(self)

    patch(LogFolder, "remove", remove_segments_first)


@bug("folder: workers of the run before are not forgotten", LOG, "meetings")
def _(patch: Patch) -> None:
    patch(durable_server, "forget_workers", lambda state: None)


@bug("folder: old segments are removed before the new one is named", LOG)
def _(patch: Patch) -> None:
    forget = LogFolder.forget_before_last

    def unlink_and_forget(self: LogFolder) -> None:
        numbers = self._all()
        self._unlink(numbers[:-1])
        forget(self)

    patch(LogFolder, "forget_before_last", unlink_and_forget)
