"""How the pods of a job are: the newest of each role and number, how often it was replaced, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchfleet.launch.clusters.k8s.k8s_job import Document
from torchfleet.launch.clusters.k8s.pod_template import INDEX

COMPONENT = "app.kubernetes.io/component"
_ORDER = ("server", "backup", "worker", "rank")


@dataclass(frozen=True)
class PodState:
    """A role of the job, as its newest pod has it."""

    role: str
    index: int
    pod: str
    phase: str
    restarts: int
    reason: str
    node: str

    @property
    def title(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def has_output(self) -> bool:
        return self.phase in ("Running", "Succeeded", "Failed")


def pod_states(pods: Sequence[Document]) -> list[PodState]:
    """One for each role and number, servers first. A pod that was replaced is kept by its Job, and counted."""
    groups: dict[tuple[str, int], list[Document]] = {}
    for pod in pods:
        role = pod["metadata"].get("labels", {}).get(COMPONENT, "")
        if role in _ORDER:
            groups.setdefault((role, _index(pod)), []).append(pod)
    found = []
    for (role, index), made in sorted(groups.items(), key=lambda item: (_ORDER.index(item[0][0]), item[0][1])):
        made.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""))
        newest = made[-1]
        reason = _reason(newest) or (f"before: {_reason(made[-2])}" if len(made) > 1 else "")
        phase = str(newest.get("status", {}).get("phase") or "Unknown")
        node = str(newest.get("spec", {}).get("nodeName") or "")
        found.append(PodState(role, index, newest["metadata"]["name"], phase, len(made) - 1, reason, node))
    return found


def _index(pod: Document) -> int:
    """The number of the role: the variable of a server that is a Job of its own, else the index of the pod."""
    for container in pod.get("spec", {}).get("containers", []):
        for variable in container.get("env") or []:
            if variable["name"] == "FLEET_INDEX" and str(variable.get("value") or "").isdigit():
                return int(variable["value"])
    text = str(pod["metadata"].get("annotations", {}).get(INDEX) or "0")
    return int(text) if text.isdigit() else 0


def _reason(pod: Document) -> str:
    """Why a pod is not simply running, in Kubernetes' own words; "" if it is, or has finished."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        waiting, ended = state.get("waiting"), state.get("terminated")
        if waiting and waiting.get("reason"):
            return _joined(waiting["reason"], waiting.get("message"))
        if ended and ended.get("exitCode"):
            return f"{ended.get('reason') or 'Error'}, exit status {ended['exitCode']}"
    if status.get("reason"):
        return _joined(status["reason"], status.get("message"))
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _joined(condition.get("reason") or "not scheduled", condition.get("message"))
    return ""


def _joined(reason: str, message: str | None) -> str:
    return f"{reason}: {message}" if message else reason


def job_ends(jobs: Sequence[Document]) -> tuple[list[str], list[str]]:
    """(Jobs that have failed, with why; Jobs that have finished)."""
    failed, finished = [], []
    for job in jobs:
        name = job["metadata"]["name"]
        for condition in job.get("status", {}).get("conditions") or []:
            if condition.get("status") != "True":
                continue
            if condition.get("type") == "Failed":
                failed.append(f"{name}: {_joined(condition.get('reason') or 'failed', condition.get('message'))}")
            elif condition.get("type") in ("Complete", "Completed"):
                finished.append(name)
    return failed, finished
