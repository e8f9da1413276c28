"""What a replica begins as: the primary of its shard, if it can claim it, or a follower."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination.view import Coordinator, View
from torchfleet.ps.server.replicas.between import Identity


@dataclass(frozen=True)
class Beginning:
    view: View | None  # in which the replica is primary; None: it follows


def claim(own: Identity, coordinator: Coordinator, has_log: bool = False) -> Beginning | None:
    """What the replica begins as; None if that is unknown, because the coordinator does not answer: ask again.

    Only replica 0 claims a shard, which must have had no primary or, unless the replica was restarted, belong to a job
    that is over. `has_log`: a replica can be restored from a log, so no replica begins without rows.
    """
    if own.replica or has_log:
        return Beginning(None)
    with contextlib.suppress(CoordinatorUnreachable):
        before = coordinator.read(own.shard)
        if before is not None and before.primary == own.name:  # an earlier claim, whose answer was lost
            return Beginning(before)
        if before is not None and (not before.is_last or own.restart):
            return Beginning(None)
        view = View((before.term if before else 0) + 1, own.name)
        if coordinator.replace(own.shard, before, view):
            return Beginning(view)
    return None
