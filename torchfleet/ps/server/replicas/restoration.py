"""A server that was restored from its log, until the coordinator has said whether it is primary."""

from __future__ import annotations

import contextlib

from torchfleet.base.errors import CoordinatorUnreachable, LogError
from torchfleet.ps.coordination.view import Coordinator, View
from torchfleet.ps.server.log.durable_server import DurableServer
from torchfleet.ps.server.replicas.between import Identity


class Restoration:
    """Two replicas may be restored at the same time. The one whose change of the view comes first is primary."""

    def __init__(self, logged: DurableServer, before: View | None) -> None:
        """`before`: the view that the replica was restored under; None: the run has had no primary. Raises LogError if
        the coordinator is that of another run than the log."""
        if before is not None and before.term < logged.noted_term:
            raise LogError(
                f"the log is of term {logged.noted_term}, and the coordinator has term {before.term}: it is that of "
                "another run. Give --coordinator the NAME of this run, or of a new one."
            )
        self.logged, self._before = logged, before
        self.is_late = False  # another replica has the shard

    @property
    def is_new_run(self) -> bool:
        return self._before is None

    def ask(self, own: Identity, coordinator: Coordinator) -> View | None:
        """Ask for the shard. Returns the view in which this replica is primary; None if it `is_late`, or if the
        coordinator does not answer: ask again."""
        before = self._before
        view = View((self.logged.noted_term if before is None else before.term) + 1, own.name)
        with contextlib.suppress(CoordinatorUnreachable):
            if coordinator.replace(own.shard, before, view):
                return view
            self.is_late = True
        return None
