"""The volumes of a job's pods: scratch space, the script, the role's keys, the user's claims and a server's log."""

from __future__ import annotations

from torchfleet.launch.clusters.k8s.k8s_job import (
    BACKUP,
    CACHE,
    KEYS,
    LOGS,
    RANK,
    SCRIPT,
    SERVER,
    TMP,
    WORK,
    WORKER,
    Document,
    K8sJob,
)
from torchfleet.launch.clusters.k8s.script_files import ScriptFile

PUBLIC_KEYS = ("server.key", "worker.key", "first_worker.key", "launcher.key")
# Worker 0 shares its pod template with the other workers, so all of them get both keys.
_SECRET = {
    SERVER: ("server.key_secret",),
    BACKUP: ("server.key_secret",),
    WORKER: ("worker.key_secret", "first_worker.key_secret"),
}
KEY_MODE = 0o440  # readable by the pod's group, which fsGroup sets


def mounts(job: K8sJob, role: str) -> list[Document]:
    """Return the mounts of these volumes in the container of a role."""
    found: list[Document] = [
        {"name": "work", "mountPath": WORK},
        {"name": "tmp", "mountPath": TMP},
        {"name": "cache", "mountPath": CACHE},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if job.has_script_volume:
        found.append({"name": "script", "mountPath": SCRIPT, "readOnly": True})
    if role != RANK:
        found.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    if role in (SERVER, BACKUP) and job.log_size:
        found.append({"name": "server-log", "mountPath": LOGS})
    for number, claim in enumerate(job.claims):
        more = {"readOnly": True} if claim.is_read_only else {}
        found.append({"name": f"claim-{number}", "mountPath": claim.path, **more})
    return found


def volumes(job: K8sJob, role: str, files: list[ScriptFile], server: int | None) -> list[Document]:
    found: list[Document] = [{"name": name, "emptyDir": {}} for name in ("work", "tmp", "cache")]
    found.append({"name": "shm", "emptyDir": {"medium": "Memory"}})  # counts as memory of the pod
    if job.has_script_volume:
        items = [{"key": file.key, "path": file.path} for file in files]
        found.append({"name": "script", "configMap": {"name": f"{job.name}-script", "items": items}})
    if role != RANK:
        keys = [{"key": name, "path": name} for name in (*PUBLIC_KEYS, *_SECRET[role])]
        secret = {"secretName": f"{job.name}-keys", "defaultMode": KEY_MODE, "items": keys}
        found.append({"name": "keys", "secret": secret})
    if server is not None:
        claim = {"claimName": job.log_claim(role, server)}
        found.append({"name": "server-log", "persistentVolumeClaim": claim})
    for number, kept in enumerate(job.claims):
        found.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": kept.name}})
    return found
