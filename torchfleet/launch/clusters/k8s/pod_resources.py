"""Cores, memory and GPUs of pods, and how pods are spread over nodes.

Every container has requests and limits of cores and of memory: a quota of a namespace refuses pods without them.
"""

from __future__ import annotations

from torchfleet.launch.clusters.k8s.k8s_job import BACKUP, RANK, SERVER, Document, K8sJob
from torchfleet.launch.job_spec import Resources

CPUS, MEMORY = 1.0, 4 << 30  # of a server, a worker or a rank, unless the user says otherwise
SMALL: Document = {  # of a container that copies files or sends a few requests
    "requests": {"cpu": "100m", "memory": "128Mi"},
    "limits": {"cpu": "1", "memory": "256Mi"},
}
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"  # of every pod of an Indexed Job, since version 1.28
_SERVER_LABEL = "fleet-server"  # the server's number, on pods that are Jobs of their own: their index is 0
_NODE = "kubernetes.io/hostname"
BURST = 2  # limit of cores / requested cores: kernels are compiled, and files read, beside training


def cpus_of(job: K8sJob, role: str) -> float:
    """The cores that a pod of a role requests."""
    cpus = _asked(job, role).cpus
    return CPUS * _num_processes(job, role) if cpus is None else cpus


def resources(job: K8sJob, role: str) -> Document:
    """The resources of the container of a role. Memory is request and limit."""
    asked, cpus = _asked(job, role), cpus_of(job, role)
    memory = {"memory": str(MEMORY * _num_processes(job, role) if asked.memory is None else asked.memory)}
    gpus = {} if asked.gpus is None else {"nvidia.com/gpu": str(int(asked.gpus))}
    return {
        "requests": {"cpu": milli(cpus), **memory},
        "limits": {"cpu": milli(BURST * cpus), **memory, **gpus},
    }


def _asked(job: K8sJob, role: str) -> Resources:
    return job.server if role in (SERVER, BACKUP) else job.worker


def _num_processes(job: K8sJob, role: str) -> int:
    return job.ranks_per_node if role == RANK else 1


def milli(cpus: float) -> str:
    return f"{round(cpus * 1000)}m"


def pair_label(job: K8sJob) -> str:
    """The label that a server and its backup have in common."""
    return _SERVER_LABEL if job.log_size else _INDEX_LABEL


def server_labels(server: int | None) -> dict[str, str]:
    """The labels of the pod of a Job that runs only this server. None: the pods have an index, and need no label."""
    return {} if server is None else {_SERVER_LABEL: str(server)}


def spreading(job: K8sJob, role: str) -> Document:
    """The fields of a pod that spread servers and their backups, or the pods of a collective job, over nodes.

    The API server accepts only one constraint for each topology key and effect. With backups, this constraint does what
    matters most: it keeps a backup away from its primary, the pod with the same number. (An anti-affinity cannot
    express this before Kubernetes 1.31, the first version with matchLabelKeys there.) Beyond that, servers and backups
    prefer nodes without other servers.
    """
    if not job.coordinator or role == RANK:
        return {"topologySpreadConstraints": [_spread(job, {}, job.num_nodes or job.num_servers)]}
    term = {"topologyKey": _NODE, "labelSelector": _spread_pods(job)}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {
        "topologySpreadConstraints": [_spread(job, {"matchLabelKeys": [pair_label(job)]}, 2)],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}},
    }


def _spread(job: K8sJob, keys: Document, num_pods: int) -> Document:
    is_required = job.is_spread_required
    # At least two nodes: otherwise all pods on the only node that has room would count as spread.
    least: Document = {"minDomains": min(2, num_pods), "nodeTaintsPolicy": "Honor"} if is_required else {}
    return {
        "maxSkew": 1,
        "topologyKey": _NODE,
        "whenUnsatisfiable": "DoNotSchedule" if is_required else "ScheduleAnyway",
        "labelSelector": _spread_pods(job),
        **keys,
        **least,
    }


def _spread_pods(job: K8sJob) -> Document:
    roles = {"key": "app.kubernetes.io/component", "operator": "In", "values": [SERVER, BACKUP, RANK]}
    return {"matchLabels": {"app.kubernetes.io/instance": job.name}, "matchExpressions": [roles]}
