"""A launcher's view of its job at one moment: every process, its state, and its last reported status."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchfleet.base.role.role_info import HETER_WORKER

_STILL = 10.0  # seconds without a step after which a worker is stalled, or
_NUM_STEPS = 3  # the duration of this many of its steps, if that is longer
_OF_STEPS = ("waiting", "pull_wait_ms", "push_wait_ms")  # fields that are valid only while steps are made
_OF_NOW = (*_OF_STEPS, "steps_per_s", "samples_per_s", "requests_per_s", "busy", "queue", "queue_size")  # while it runs


def name_for_people(role: str, index: int, replica: int) -> str:
    """The display name: server 0, or server 0, replica 1 for the process that began as its backup."""
    return f"{role} {index}{f', replica {replica}' if replica else ''}"


def number_in_files(index: int, replica: int) -> str:
    """The part of a file name that distinguishes this process from others of its role."""
    return f"{index}{f'.replica{replica}' if replica else ''}"


@dataclass(frozen=True)
class RoleSnapshot:
    """One process of a job."""

    role: str  # "server", "worker", "heter_worker" or "rank"
    index: int
    state: str  # "starting", "running", "done", "failed", or "waiting" for resources of a cluster
    status: dict[str, Any] = field(default_factory=dict)  # fields: docs/watching.md; empty before the first report
    replica: int = 0  # of a server: 1 is the process that began as the backup
    returncode: int | None = None  # None while the process starts or runs
    num_restarts: int = 0
    log: str = ""  # the name of its log in the folder of the run

    @property
    def key(self) -> str:
        """A unique key of the process, as used in file names: server.0, server.0.replica1, worker.3."""
        return f"{self.role}.{number_in_files(self.index, self.replica)}"

    @property
    def name(self) -> str:
        """The display name: server 0."""
        return name_for_people(self.role, self.index, self.replica)

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that the script reported: loss, auc, ..."""
        return dict(self.status.get("metrics", {}))


@dataclass(frozen=True)
class JobSnapshot:
    """All processes that one launcher watches, at one moment."""

    time: float  # seconds since 1970
    roles: Sequence[RoleSnapshot]

    def of(self, role: str) -> list[RoleSnapshot]:
        return [found for found in self.roles if found.role == role]

    @property
    def training(self) -> list[RoleSnapshot]:
        """The processes that make steps: workers or ranks."""
        return [found for found in self.roles if found.role not in ("server", HETER_WORKER)]


class RatesOfNow:
    """Corrects the rates of stalled workers, and removes those of processes that are done. Workers report when they
    make a step. A worker that waits for a server, evaluates or hangs keeps its last report, whose rates and time left
    are outdated; so does a process that has ended.
    """

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, dict[str, Any]]] = {}  # by key: (time of the last change, status)

    def of(self, snapshot: JobSnapshot) -> JobSnapshot:
        """The snapshot with zero rates for stalled workers, and none for processes that have ended or workers that have
        left. Must be called for every snapshot, in order."""
        return JobSnapshot(snapshot.time, [self._role(role, snapshot.time) for role in snapshot.roles])

    def _role(self, role: RoleSnapshot, now: float) -> RoleSnapshot:
        status, pace = role.status, role.status.get("steps_per_s")
        if role.returncode is not None or status.get("left"):
            self._reports.pop(role.key, None)
            return replace(role, status=_without(status, _OF_NOW))
        if role.state != "running" or not isinstance(pace, (int, float)):
            self._reports.pop(role.key, None)
            return role
        since, before = self._reports.get(role.key, (now, {}))
        if before != status:
            self._reports[role.key] = now, status
            return role
        return replace(role, status=_at_standstill(status)) if now - since >= _patience(pace) else role


def _patience(steps_per_s: float) -> float:
    return max(_STILL, _NUM_STEPS / steps_per_s) if steps_per_s > 0 else _STILL


def _at_standstill(status: dict[str, Any]) -> dict[str, Any]:
    found = _without(status, _OF_STEPS)
    return found | {name: 0.0 for name in ("steps_per_s", "samples_per_s") if name in status}


def _without(status: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The status without the fields `names`, and without the time left."""
    found = {name: value for name, value in status.items() if name not in names}
    if isinstance(status.get("progress"), dict):
        found["progress"] = {name: value for name, value in status["progress"].items() if name != "eta_s"}
    return found
