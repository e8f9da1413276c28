"""What pods of a job have on disk: places to write, the script, keys of the role, volumes of the user and of a log."""

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

_PUBLIC = ("server.key", "worker.key", "first_worker.key", "launcher.key")
# Worker 0 is a pod of the same template as the others, so all have both keys.
_SECRET = {
    SERVER: ("server.key_secret",),
    BACKUP: ("server.key_secret",),
    WORKER: ("worker.key_secret", "first_worker.key_secret"),
}
_KEY_MODE = 0o440  # the group is that of the pod, by fsGroup


def mounts(job: K8sJob, role: str) -> list[Document]:
    """Where the container of a role sees them."""
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
    if role == SERVER and job.log_size:
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
        keys = [{"key": name, "path": name} for name in (*_PUBLIC, *_SECRET[role])]
        secret = {"secretName": f"{job.name}-keys", "defaultMode": _KEY_MODE, "items": keys}
        found.append({"name": "keys", "secret": secret})
    if role == SERVER and job.log_size:
        claim = {"claimName": f"{job.name}-log-{server}"}
        found.append({"name": "server-log", "persistentVolumeClaim": claim})
    for number, kept in enumerate(job.claims):
        found.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": kept.name}})
    return found
