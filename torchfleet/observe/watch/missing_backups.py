"""Counts the seconds in which servers with --replicas 2 train without a backup."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch import figures


class MissingBackups:
    """Takes one snapshot after another. Counts from the first worker that has joined to the last that has left."""

    def __init__(self) -> None:
        self._looked: float | None = None  # the time of the last snapshot
        self._now: dict[int, float] = {}  # by server that has no backup: seconds without one so far
        self._total: dict[int, float] = defaultdict(float)
        self._times: dict[int, int] = defaultdict(int)  # how often each server was without one

    def look(self, snapshot: JobSnapshot) -> dict[int, float]:
        """The servers that have no backup, each with the seconds for which it has had none."""
        passed = 0.0 if self._looked is None else max(0.0, snapshot.time - self._looked)
        self._looked = snapshot.time
        before, self._now = self._now, {}
        for server in _unprotected(snapshot):
            self._times[server] += server not in before
            self._now[server] = before.get(server, 0.0) + passed
            self._total[server] += passed
        return self._now

    def report(self) -> Iterator[str]:
        """Lines for the end of the job: which servers were without a backup, for how long, and how often."""
        for server, seconds in sorted(self._total.items()):
            times = figures.plural(self._times[server], "time")
            yield f"server {server} was without a backup for {figures.duration(seconds)} ({times})"


def _unprotected(snapshot: JobSnapshot) -> Iterator[int]:
    workers = snapshot.of("worker")
    if workers and all(worker.returncode is not None or worker.status.get("left") for worker in workers):
        return
    replicas: dict[int, list[RoleSnapshot]] = defaultdict(list)
    for role in snapshot.of("server"):
        replicas[role.index].append(role)
    for server, both in replicas.items():
        is_training = any(role.status.get("workers_joined") for role in both)
        if is_training and any("backup" in role.status for role in both) and not _has_backup(both):
            yield server


def _has_backup(replicas: list[RoleSnapshot]) -> bool:
    """Whether the primary of these replicas has a backup. True for a single replica that is not primary: the other one
    runs on another machine, and may be primary there."""
    primaries = [role for role in replicas if role.returncode is None and role.status.get("backup") is False]
    if not primaries:
        return len(replicas) == 1
    return bool(max(primaries, key=lambda role: role.status.get("term", 0)).status.get("has_backup"))
