"""Planted bugs of membership: who is lost, who is counted out, who has come back. See planted.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.faults.planted import Patch, bug

from torchfleet.api.job import joining
from torchfleet.ps.server import among_workers, waiting
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.server import Server

LOST, AWAITED = "lost workers", "awaited workers"
KEPT = ("logged", "replicas")


@bug("members: what a process sends that was counted out is taken", script=LOST)
def _(patch: Patch) -> None:
    patch(Members, "count_out", lambda *_: None)


@bug("members: the push of a process that was killed stays in the step of its successor", script=LOST)
def _(patch: Patch) -> None:
    patch(among_workers, "_drop_step", lambda *_: None)


@bug("members: a worker that has come back is not waited for", script=LOST)
def _(patch: Patch) -> None:
    begin = Members.begin

    def begin_absent(self: Members, worker: int, is_new: bool) -> None:
        begin(self, worker, is_new)
        if self.num_restarts(worker):
            self.absent.add(worker)

    patch(Members, "begin", begin_absent)


@bug("members: that a worker is lost is not noted in the log", KEPT, script=LOST)
def _(patch: Patch) -> None:
    go_on_without = waiting._go_on_without
    patch(waiting, "_go_on_without", lambda state, lost: go_on_without(state, lost) and False)


@bug("members: are not copied", KEPT, script=LOST)
def _(patch: Patch) -> None:
    patch(Members, "restore", lambda *_: None)


@bug("rejoining: servers that are a step apart are taken as they are", script=LOST)
def _(patch: Patch) -> None:
    def first_step(client: Any, told: Any, *_: Any) -> int:
        return max(joined.step for joined in told)

    patch(joining, "catch_up", first_step)


@bug("sessions: a refusal of a late copy takes the place of what became of the change", KEPT, script=LOST)
def _(patch: Patch) -> None:
    answer = Server.answer

    def answer_and_settle(self: Server, request: Any) -> None:
        num = len(self.state.finished)
        answer(self, request)
        message = request.message
        for asked, result in self.state.finished[num:]:
            if asked is request and isinstance(result, Exception) and message.sequence:
                self.state.sessions.settle(message.client, message.sequence, result)  # type: ignore[arg-type]

    patch(Server, "answer", answer_and_settle)


@bug("wait: the loss of a worker ends the waits for it", script=AWAITED)
def _(patch: Patch) -> None:
    _after_init(patch, lambda members: setattr(members, "wait", False))


@bug("wait: the others go on without a lost worker", script=AWAITED)
def _(patch: Patch) -> None:
    _after_init(patch, lambda members: setattr(members, "go_on", True))


def _after_init(patch: Patch, change: Callable[[Members], None]) -> None:
    init = Members.__init__

    def init_and_change(self: Members, *settings: Any) -> None:
        init(self, *settings)
        change(self)

    patch(Members, "__init__", init_and_change)


@bug("elastic: servers go on when the last worker has left", script="elastic")
def _(patch: Patch) -> None:
    patch(Members, "is_over", lambda self, num_workers: False)


@bug("elastic: who has left is not copied", KEPT, script="elastic")
def _(patch: Patch) -> None:
    restore = Members.restore
    patch(Members, "restore", lambda self, kept: restore(self, {**kept, "left": {}}))
