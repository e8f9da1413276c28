"""Decides when a process is recorded: at the same moments for every record of a run."""

from __future__ import annotations

import time

from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot

_SHORTEST, _LONGEST = 1.0, 60.0  # seconds between two records of a process
_SHARE = 1 / 600  # of the age of the job


class DueRoles:
    """A process is due when its state changes or it restarts, and otherwise once a period if its status has changed.

    The period grows with the age of the job, from a second to a minute, so that the record of a week takes megabytes.
    """

    def __init__(self) -> None:
        self._started = time.time()
        self._taken: dict[str, tuple[float, RoleSnapshot]] = {}  # by key: when, and what

    def of(self, snapshot: JobSnapshot) -> list[RoleSnapshot]:
        """Return the processes that are due now. They count as recorded."""
        period = min(_LONGEST, max(_SHORTEST, (snapshot.time - self._started) * _SHARE))
        found = [role for role in snapshot.roles if self._is_due(role, snapshot.time, period)]
        for role in found:
            self._taken[role.key] = snapshot.time, role
        return found

    def _is_due(self, role: RoleSnapshot, now: float, period: float) -> bool:
        when, before = self._taken.get(role.key, (0.0, None))
        is_new = before is None or (before.state, before.num_restarts) != (role.state, role.num_restarts)
        is_time = not 0 <= now - when < period  # a clock set back must not stop the recording
        return is_new or (is_time and role != before)
