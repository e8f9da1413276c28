"""Planted bugs of copies: what a server hands on to the one that takes its place. See planted.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.faults.bugs.planted_logs import BOTH
from support.faults.planted import Patch, bug

from torchfleet.ps.server.log import logged_server, state_copy
from torchfleet.ps.server.log.state_copy import StateImport
from torchfleet.ps.server.meeting.barrier import Barriers
from torchfleet.ps.server.meeting.file_lists import FileLists
from torchfleet.ps.server.meeting.gathering import Gatherings
from torchfleet.ps.server.meeting.mail import Mail
from torchfleet.ps.server.state.changes import Changes
from torchfleet.ps.server.state.sessions import Sessions
from torchfleet.ps.server.state.work_queue import Schedule
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.table import Table


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


@bug("copy: pushes of the sync step that is open are left out", BOTH, "sync")
def _(patch: Patch) -> None:
    _change_body(patch, "sync_step", {})


@bug("copy: the number of sync steps is left out", BOTH, "lost workers")
def _(patch: Patch) -> None:
    _change_body(patch, "num_steps", 0)


@bug("copy: barriers that have opened are left out", BOTH, "meetings")
def _(patch: Patch) -> None:
    patch(Barriers, "restore", lambda self, kept: None)


def _change_body(patch: Patch, name: str, value: Any) -> None:
    body = state_copy._body

    def changed(server: Any) -> Any:
        made = body(server)
        setattr(made, name, value)
        return made

    patch(state_copy, "_body", changed)


@bug("copy: steps of tables are left out", BOTH, "tokens")
def _(patch: Patch) -> None:
    patch(Table, "restore_notes", lambda self, notes: None)


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
