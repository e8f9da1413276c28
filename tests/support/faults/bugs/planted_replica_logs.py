"""Planted bugs of replicas that keep logs. See planted.py."""

from __future__ import annotations

from support.faults.planted import Patch, bug

from torchfleet.ps.coordination.view import View
from torchfleet.ps.server.log.durable_server import DurableServer
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.replicas import replica_log
from torchfleet.ps.server.replicas.follower import Follower

BOTH = ("both",)


@bug("primary: its log does not say which term it is of", BOTH)
def _(patch: Patch) -> None:
    patch(DurableServer, "lead", LoggedServer.lead)
    patch(DurableServer, "is_noted", True)


@bug("replica: is restored from its log though the view does not name it", BOTH)
def _(patch: Patch) -> None:
    def may_restore(self: Follower, view: View | None, now: float) -> bool:
        if view is None:
            return self._log is not None and self._log.is_newest
        return self._has_log and bool(self._is_replaced(view.primary) or now - self._begun > 1.0)

    patch(Follower, "_may_restore", may_restore)


@bug("replica: a new run goes on from any log", BOTH)
def _(patch: Patch) -> None:
    patch(replica_log, "is_newest", lambda durability, is_first: is_first)
