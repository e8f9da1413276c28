"""The pods of a job: one unprivileged container each, with the files, keys and volumes that its role needs."""

from __future__ import annotations

from torchfleet.base.role.process_settings import MAX_RESTART, RUN_SCRIPT, WAIT_FOR_BACKUPS
from torchfleet.launch.clusters.k8s.k8s_job import (
    BACKUP,
    CACHE,
    HEALTH_PORT,
    KEYS,
    LOGS,
    MASTER_PORT,
    PORT,
    RANK,
    SERVER,
    TMP,
    WORK,
    WORKER,
    Application,
    Document,
    K8sJob,
)
from torchfleet.launch.clusters.k8s.pod_metrics import ports, scrape_annotations
from torchfleet.launch.clusters.k8s.pod_metrics import variables as exported
from torchfleet.launch.clusters.k8s.pod_resources import SMALL, cpus_of, resources, server_labels, spreading
from torchfleet.launch.clusters.k8s.pod_volumes import mounts, volumes
from torchfleet.launch.clusters.k8s.script_files import ScriptFile

MEMBER = ("python", "-m", "torchfleet.launch.clusters.member")
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
NO_RIGHTS = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_COMPILED = "/opt/torchfleet/cache"  # the same path as in the Dockerfile
_LEAST_GRACE = 30  # seconds: the default of Kubernetes
_FAREWELL = 10  # seconds that a script has to end after its time for saving


def pod_template(job: K8sJob, role: str, files: list[ScriptFile], server: int | None = None) -> Document:
    """The template of a Job's pods. `server`: the number of the server if the Job runs only this server, or only its
    backup. None: each pod takes its completion index as its number."""
    spec: Document = {
        "restartPolicy": "Never",  # a new pod, possibly on another node, replaces a failed one
        "terminationGracePeriodSeconds": max(_LEAST_GRACE, job.grace + _FAREWELL),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "subdomain": job.name,
        "securityContext": security(job),
        "initContainers": [kernels(job)],
        "containers": [_container(job, role, server)],
        "volumes": volumes(job, role, files, server),
    }
    if job.is_jobset:
        del spec["subdomain"]  # the JobSet sets it
    if job.service_account:
        spec["serviceAccountName"] = job.service_account
    if role != WORKER:
        spec |= spreading(job, role)
    spec |= placement(job)
    metadata = {"labels": {**labels(job, role), **server_labels(server)}, **scrape_annotations(job)}
    return {"metadata": metadata, "spec": spec}


def placement(job: Application) -> Document:
    """The fields of a pod that decide on which nodes it runs, its priority, and the access to its image."""
    found: Document = {
        "imagePullSecrets": [{"name": name} for name in job.pull_secrets],
        "nodeSelector": dict(job.node_selector),
        "tolerations": [dict(toleration) for toleration in job.tolerations],
        "priorityClassName": job.priority_class,
    }
    return {name: value for name, value in found.items() if value}


def labels(job: Application, role: str | None = None) -> dict[str, str]:
    """The labels that all objects of an application share; with `role`, the labels of a pod of that role."""
    common = {
        "app.kubernetes.io/name": "torchfleet",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "fleetrun",
    }
    return {**common, "app.kubernetes.io/component": role} if role else common


def k8s_object(job: Application, version: str, kind: str, name: str) -> Document:
    """Return an object of an application with its name, namespace and labels only."""
    metadata: Document = {"name": name, "labels": labels(job)}
    if job.namespace:
        metadata["namespace"] = job.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def literal(text: str) -> str:
    """Escape `text` for a command or the value of a variable, where Kubernetes would expand $(NAME)."""
    return text.replace("$", "$$")


def _container(job: K8sJob, role: str, server: int | None) -> Document:
    made: Document = {
        "name": role,
        "image": job.image,
        "command": _command(job, role),
        "workingDir": WORK,
        "env": _environment(job, role, server),
        "resources": resources(job, role),
        "volumeMounts": mounts(job, role),
        "securityContext": dict(NO_RIGHTS),
    }
    if job.env_secrets:
        made["envFrom"] = [{"secretRef": {"name": name}} for name in job.env_secrets]
    if role == RANK:
        made["ports"] = [{"name": "master", "containerPort": MASTER_PORT}, *ports(job, role)]
        return made
    made["ports"] = [{"name": "health", "containerPort": HEALTH_PORT}, *ports(job, role)]
    if role in (SERVER, BACKUP):
        made["ports"].insert(0, {"name": "fleet", "containerPort": PORT})
    return {**made, **_probes(role)}


def kernels(job: Application) -> Document:
    """The init container that copies the compiled kernels out of the image, if it has any that this user can read.
    Without them every pod compiles for a minute or more."""
    copy = f"cp -R {_COMPILED}/. {CACHE} || echo 'no kernels from the image: this pod compiles those that it needs'"
    return {
        "name": "kernels",
        "image": job.image,
        "command": ["sh", "-c", copy],
        "resources": SMALL,
        "volumeMounts": [{"name": "cache", "mountPath": CACHE}],
        "securityContext": dict(NO_RIGHTS),
    }


def _command(job: K8sJob, role: str) -> list[str]:
    script = [literal(part) for part in job.command]
    if role != RANK:
        return [*MEMBER, *script]
    options = {
        "--nproc_per_node": str(job.ranks_per_node),
        "--nnodes": str(job.num_nodes),
        "--master": job.master,
        "--rank": "$(FLEET_INDEX)",
        "--max_restart": str(job.max_restart),
        "--log_dir": f"{TMP}/log",
    }
    given = [part for pair in options.items() for part in pair]
    return ["python", "-m", "torchfleet.launch", *given, "--insecure", *script]


def _probes(role: str) -> Document:
    """The probes. A member answers as soon as it runs, so a script that imports for minutes does not fail them."""
    probe: Document = {"httpGet": {"path": "/healthz", "port": "health"}, "timeoutSeconds": 5}
    found = {
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
    }
    if role != WORKER:
        found["readinessProbe"] = {**probe, "httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 5}
    return found


def _environment(job: K8sJob, role: str, server: int | None) -> list[Document]:
    index = _annotation("FLEET_INDEX", INDEX) if server is None else {"name": "FLEET_INDEX", "value": str(server)}
    defaults = {"PYTHONUNBUFFERED": "1", "HOME": WORK, "XDG_CACHE_HOME": CACHE, **_threads(job, role)}
    defaults |= exported(job)
    given = _variables({**defaults, **dict(job.environment)})
    if role == RANK:
        return [index, *given]
    fixed = {
        "FLEET_GROUP": SERVER if role == BACKUP else role,
        "FLEET_SERVER_ENDPOINTS": job.server_endpoints,
        "FLEET_NUM_WORKERS": str(job.num_workers),
        **({"FLEET_MIN_WORKERS": str(job.min_workers)} if job.min_workers else {}),
        **({MAX_RESTART: str(job.max_restart)} if role == WORKER and job.max_restart else {}),
        "FLEET_HEALTH_PORT": str(HEALTH_PORT),
        **({"FLEET_GRACE": str(job.grace)} if job.grace else {}),
        **({"FLEET_SAVE_ON_STOP": job.save_on_stop} if job.save_on_stop else {}),
        "FLEET_KEY_DIR": KEYS,
        **({"FLEET_INSECURE": "1"} if job.insecure else {}),
        **({RUN_SCRIPT: "1"} if job.servers_run_script and role != WORKER else {}),
        **_endurance(job, role),
    }
    # A replica that restarts after the end of the job must not start the job again: it reads its number of restarts
    # here. Workers ask the servers for theirs.
    told = [_annotation("FLEET_RESTART", FAILURES)] if job.coordinator and role != WORKER else []
    return [index, *told, *_variables(fixed), *given]


def _endurance(job: K8sJob, role: str) -> dict[str, str]:
    found = {} if job.waits_for_backups else {WAIT_FOR_BACKUPS: "0"}
    if job.log_size:  # for workers too: they wait for a server that restarts
        found |= {"FLEET_DURABILITY": "log", "FLEET_LOG_STORE": LOGS, "FLEET_LOG_RUN": job.run}
        found |= {} if job.fsync_ms is None else {"FLEET_FSYNC_MS": f"{job.fsync_ms:g}"}
    if job.coordinator and role != WORKER:
        found |= {"FLEET_COORDINATOR": job.coordinator, "FLEET_REPLICA": "1" if role == BACKUP else "0"}
    return found


def _threads(job: K8sJob, role: str) -> dict[str, str]:
    """Limit torch's threads to the cores that the pod requests. It may see all cores of its node."""
    if role in (SERVER, BACKUP):
        return {"OMP_NUM_THREADS": "1"}
    return {"OMP_NUM_THREADS": str(max(1, int(cpus_of(job, role) / max(1, job.ranks_per_node))))}


def _variables(values: dict[str, str]) -> list[Document]:
    return [{"name": name, "value": literal(value)} for name, value in values.items()]


def _annotation(variable: str, name: str) -> Document:
    """A variable with the value of an annotation that the Job's controller sets; "" if it is not set."""
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}}}


def security(job: Application) -> Document:
    own = {"runAsUser": job.user, "runAsGroup": job.user, "fsGroup": job.user}
    return {
        "runAsNonRoot": True,
        **own,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
