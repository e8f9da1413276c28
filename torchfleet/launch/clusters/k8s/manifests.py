"""The objects of a job, of built-in kinds: a headless Service, a NetworkPolicy, a Secret, a ConfigMap, volumes,
disruption budgets, Jobs, and a small Job, with its rights, that makes the Jobs the owners of the other objects.

Servers run as Jobs, like workers: a StatefulSet would restart a server that has finished. Workers address a server by
the DNS name of its pod, which an Indexed Job keeps when it replaces the pod.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping

from torchfleet.base.own_folders import own_folder
from torchfleet.launch.clusters.k8s.k8s_job import BACKUP, RANK, SERVER, WORKER, Document, K8sJob
from torchfleet.launch.clusters.k8s.owner import owner
from torchfleet.launch.clusters.k8s.pod_metrics import ingress
from torchfleet.launch.clusters.k8s.pod_resources import pair_label
from torchfleet.launch.clusters.k8s.pod_template import k8s_object, labels, pod_template
from torchfleet.launch.clusters.k8s.script_files import ScriptFile
from torchfleet.ps.net.keys import keygen

MISTAKE = 2  # exit status for wrong options, environment or keys: a retry would fail again
SAVED = 75  # exit status of a process that saved because it was asked to end: it must be restarted


def new_keys() -> dict[str, bytes]:
    """Return keys for one job, by file name: the same files that `fleetrun --keygen` writes."""
    with own_folder("keys") as folder:
        return {path.name: path.read_bytes() for path in keygen(folder / "keys")}


def documents(job: K8sJob, files: list[ScriptFile], keys: Mapping[str, bytes]) -> list[Document]:
    """Return all objects in the order of their creation: what a pod needs comes before the pod."""
    found = [network_policy(job)]
    if not job.is_jobset:
        found.insert(0, service(job))  # a JobSet creates its own Service
    if not job.is_collective:
        found.append(secret(job, keys))
    if files:
        found.append(config_map(job, files))
    if job.log_size:
        found += log_claims(job, job.log_size)
    if job.coordinator:
        found += [disruption_budget(job, index) for index in range(job.num_servers)]
    running = [job_set(job, files)] if job.is_jobset else jobs(job, files)
    return [*found, *running, *(owner(job, found, running) if job.has_owner else [])]


def service(job: K8sJob) -> Document:
    """The headless Service that gives every pod a DNS name, even before it is ready: roles start in any order."""
    made = k8s_object(job, "v1", "Service", job.name)
    selector = {"app.kubernetes.io/instance": job.name, "app.kubernetes.io/name": "torchfleet"}
    made["spec"] = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return made


def network_policy(job: K8sJob) -> Document:
    """Only pods of this job can connect to pods of this job, except to the metrics ports, which are open to all.

    A cluster whose network does not implement policies lets every connection in.
    """
    made = k8s_object(job, "networking.k8s.io/v1", "NetworkPolicy", job.name)
    own = {"matchLabels": {"app.kubernetes.io/instance": job.name, "app.kubernetes.io/name": "torchfleet"}}
    made["spec"] = {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}, *ingress(job)],
    }
    return made


def secret(job: K8sJob, keys: Mapping[str, bytes]) -> Document:
    made = k8s_object(job, "v1", "Secret", f"{job.name}-keys")
    made["type"] = "Opaque"
    made["data"] = {name: base64.b64encode(key).decode() for name, key in sorted(keys.items())}
    return made


def config_map(job: K8sJob, files: list[ScriptFile]) -> Document:
    made = k8s_object(job, "v1", "ConfigMap", f"{job.name}-script")
    made["data"] = {file.key: file.text for file in files}
    return made


def log_claims(job: K8sJob, size: str) -> list[Document]:
    """The claims for the volumes of the logs of servers and backups."""
    names = dict.fromkeys(job.log_claim(role, index) for index in range(job.num_servers) for role in job.server_roles)
    mode = "ReadWriteMany" if job.has_shared_logs else "ReadWriteOnce"
    storage = {"storageClassName": job.storage_class} if job.storage_class else {}
    spec: Document = {"accessModes": [mode], "resources": {"requests": {"storage": size}}, **storage}
    return [{**k8s_object(job, "v1", "PersistentVolumeClaim", name), "spec": spec} for name in names]


def disruption_budget(job: K8sJob, index: int) -> Document:
    """Only one of a server and its backup may be evicted at a time. A backup that does not have all rows yet is not
    ready, so its primary is not evicted."""
    made = k8s_object(job, "policy/v1", "PodDisruptionBudget", f"{job.name}-server-{index}")
    made["spec"] = {
        "minAvailable": 1,  # maxUnavailable works only with controllers that can be scaled, unlike a Job
        "selector": {
            "matchLabels": {"app.kubernetes.io/instance": job.name, pair_label(job): str(index)},
            "matchExpressions": [{"key": "app.kubernetes.io/component", "operator": "In", "values": [SERVER, BACKUP]}],
        },
    }
    return made


def jobs(job: K8sJob, files: list[ScriptFile]) -> list[Document]:
    """A Job for each group of pods."""
    made = []
    for name, spec in _job_specs(job, files).items():
        role = spec["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        found = k8s_object(job, "batch/v1", "Job", f"{job.name}-{name}")
        found["metadata"]["labels"] = labels(job, role)
        made.append({**found, "spec": {**spec, **ttl(job)}})
    return made


def job_set(job: K8sJob, files: list[ScriptFile]) -> Document:
    """The same Jobs as one JobSet, whose controller can restart all of them together."""
    made = k8s_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", job.name)
    replicated = [
        {"name": name, "replicas": 1, "template": {"metadata": {"labels": labels(job)}, "spec": spec}}
        for name, spec in _job_specs(job, files).items()
    ]
    spec: Document = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [RANK if job.is_collective else WORKER]},
        "failurePolicy": {"maxRestarts": job.max_job_restart},
        **ttl(job),
        "replicatedJobs": replicated,
    }
    return {**made, "spec": spec}


def _job_specs(job: K8sJob, files: list[ScriptFile]) -> dict[str, Document]:
    """Return the spec of each Job, by the suffix of its name."""
    if job.is_collective:
        return {RANK: _job_spec(job, RANK, job.num_nodes, job.max_restart, pod_template(job, RANK, files))}
    # A server that lost its rows is useless: it is restarted only if a log or a backup has them.
    restarts = job.max_restart if job.log_size or job.coordinator else 0
    made: dict[str, Document] = {}
    if job.log_size:  # each replica of a server has its own volume, and so its own template
        for role, index in itertools.product(job.server_roles, range(job.num_servers)):
            template = pod_template(job, role, files, index)
            made[f"{role}-{index}"] = _job_spec(job, role, 1, restarts, template)
    else:
        for role in job.server_roles:
            made[role] = _job_spec(job, role, job.num_servers, restarts, pod_template(job, role, files))
    made[WORKER] = _job_spec(job, WORKER, job.num_workers, job.max_restart, pod_template(job, WORKER, files))
    return made


def _job_spec(job: K8sJob, role: str, num: int, restarts: int, template: Document) -> Document:
    """The spec of a Job with `num` parallel pods. Each is replaced up to `restarts` times, then the Job fails."""
    rules: list[Document] = [
        {"action": "FailJob", "onExitCodes": {"containerName": role, "operator": "In", "values": [MISTAKE]}}
    ]
    is_elastic = role == WORKER and job.min_workers > 0
    if restarts or is_elastic:  # a pod that Kubernetes evicted does not count as failed
        moved = {"type": "DisruptionTarget", "status": "True"}
        saved = {"containerName": role, "operator": "In", "values": [SAVED]}
        rules += [{"action": "Ignore", "onExitCodes": saved}, {"action": "Ignore", "onPodConditions": [moved]}]
    # An elastic job is complete when its first `min_workers` workers have finished: no other worker is waited for.
    first = "0" if job.min_workers == 1 else f"0-{job.min_workers - 1}"  # Kubernetes refuses a range of one index
    success = {"successPolicy": {"rules": [{"succeededIndexes": first}]}} if is_elastic else {}
    return {
        "completionMode": "Indexed",
        "completions": num,
        "parallelism": num,
        "backoffLimitPerIndex": restarts,
        "maxFailedIndexes": 0,
        **success,
        "podFailurePolicy": {"rules": rules},
        "podReplacementPolicy": "Failed",  # two pods with one name would be two servers with one log
        "template": template,
    }


def ttl(job: K8sJob) -> Document:
    return {} if job.ttl is None else {"ttlSecondsAfterFinished": job.ttl}
