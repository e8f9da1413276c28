"""Planted bugs of workers that are slow to start, and of servers that all workers have deserted. See planted.py."""

from __future__ import annotations

from support.faults.planted import Patch, bug

from torchfleet.ps.coordination.view import View
from torchfleet.ps.server.log.durable_server import DurableServer
from torchfleet.ps.server.meeting.presence import Presence
from torchfleet.ps.server.replicas.follower import Follower
from torchfleet.ps.server.replicas.replica import Replica

STARTS = "slow starts"


@bug("starting: servers do not wait for a worker that is being started", script=STARTS)
def _(patch: Patch) -> None:
    patch(Presence, "expect", lambda *_: False)


@bug("starting: servers wait for an instant only", script=STARTS)
def _(patch: Patch) -> None:
    expect = Presence.expect
    patch(Presence, "expect", lambda self, worker, seconds, now: expect(self, worker, seconds / 20, now))


@bug("desertion: servers end as if all workers had left", ("logged",), script=STARTS)
def _(patch: Patch) -> None:
    patch(DurableServer, "end", lambda self, keeps_log=False: self.close(self.is_stopping and not keeps_log))


@bug("desertion: the view says that the job is over", ("both",), script=STARTS)
def _(patch: Patch) -> None:
    patch(View, "left_by", lambda self, workers: self.over())


@bug("desertion: a backup takes it for the end of the job", ("both",), script=STARTS)
def _(patch: Patch) -> None:
    end = Replica.end

    def end_over(self: Replica, keeps_log: bool = False) -> None:
        if self._follower is not None:
            self.is_over, self._server.desertion = True, ""
        end(self, keeps_log)

    patch(Replica, "end", end_over)


@bug("desertion: a replica does not go on from its log afterwards", ("both",), script=STARTS)
def _(patch: Patch) -> None:
    may_restore = Follower._may_restore

    def unless_deserted(self: Follower, view: View | None, now: float) -> bool:
        return may_restore(self, view, now) and not (view is not None and view.deserted)

    patch(Follower, "_may_restore", unless_deserted)
