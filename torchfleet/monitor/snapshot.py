"""What a launcher sees of its job at one moment: every process, its state, and the status that it reported last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def name_for_people(role: str, index: int, replica: int) -> str:
    """server 0; of the process that began as its backup: server 0, replica 1."""
    return f"{role} {index}{f', replica {replica}' if replica else ''}"


def number_in_files(index: int, replica: int) -> str:
    """What tells the files of a process from those of others of its role."""
    return f"{index}{f'.replica{replica}' if replica else ''}"


@dataclass(frozen=True)
class RoleSnapshot:
    """One process of a job."""

    role: str  # "server", "worker" or "rank"
    index: int
    state: str  # "starting", "running", "done", "failed", or "waiting": for room in a cluster
    status: dict[str, Any] = field(default_factory=dict)  # docs/watching.md has the fields; empty before the first
    replica: int = 0  # of a server: 1 is the process that began as the backup
    returncode: int | None = None  # None while it starts or runs
    num_restarts: int = 0
    log: str = ""  # the name of its log in the folder of the run

    @property
    def key(self) -> str:
        """What tells it from the other processes, as in the names of files: server.0, server.0.replica1, worker.3."""
        return f"{self.role}.{number_in_files(self.index, self.replica)}"

    @property
    def name(self) -> str:
        """For people: server 0."""
        return name_for_people(self.role, self.index, self.replica)

    @property
    def metrics(self) -> dict[str, float]:
        """What the script reported: loss, auc, ..."""
        return dict(self.status.get("metrics", {}))


@dataclass(frozen=True)
class JobSnapshot:
    """All processes that one launcher watches, at the same moment."""

    time: float  # seconds since 1970
    roles: Sequence[RoleSnapshot]

    def of(self, role: str) -> list[RoleSnapshot]:
        return [found for found in self.roles if found.role == role]
