"""The pods of a job: one container each, without rights, with the files, keys and volumes that its role needs."""

from __future__ import annotations

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
    Document,
    K8sJob,
)
from torchfleet.launch.clusters.k8s.pod_metrics import ports, scrape_annotations
from torchfleet.launch.clusters.k8s.pod_metrics import variables as exported
from torchfleet.launch.clusters.k8s.pod_volumes import mounts, volumes
from torchfleet.launch.clusters.k8s.script_files import ScriptFile

MEMBER = ("python", "-m", "torchfleet.launch.clusters.member")
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
_NO_RIGHTS = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_COMPILED = "/opt/torchfleet/cache"  # as the Dockerfile has it
_LEAST_GRACE = 30  # seconds, as Kubernetes has it where nothing is said
_FAREWELL = 10  # seconds for a script to end in, once its time to save is over


def pod_template(job: K8sJob, role: str, files: list[ScriptFile], server: int | None = None) -> Document:
    """The template of a Job's pods. `server`: the number of the one server that this Job runs; None: the pod's index
    says which one it is."""
    spec: Document = {
        "restartPolicy": "Never",  # a failed pod is replaced by a new one, which may be elsewhere
        "terminationGracePeriodSeconds": max(_LEAST_GRACE, job.grace + _FAREWELL),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "subdomain": job.name,
        "securityContext": _security(job),
        "initContainers": [_kernels(job)],
        "containers": [_container(job, role, server)],
        "volumes": volumes(job, role, files, server),
    }
    if job.is_jobset:
        del spec["subdomain"]  # the JobSet sets it
    if job.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in job.pull_secrets]
    if job.node_selector:
        spec["nodeSelector"] = dict(job.node_selector)
    if job.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in job.tolerations]
    if role != WORKER:
        spec["topologySpreadConstraints"] = [_spread(job)]
    return {"metadata": {"labels": labels(job, role), **scrape_annotations(job)}, "spec": spec}


def labels(job: K8sJob, role: str | None = None) -> dict[str, str]:
    """What all objects of a job have in common, by which they are found again; with its role, those of a pod."""
    common = {
        "app.kubernetes.io/name": "torchfleet",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "fleetrun",
    }
    return {**common, "app.kubernetes.io/component": role} if role else common


def literal(text: str) -> str:
    """`text` as Kubernetes takes it in a command, or in the value of a variable, where $(NAME) would be expanded."""
    return text.replace("$", "$$")


def _container(job: K8sJob, role: str, server: int | None) -> Document:
    made: Document = {
        "name": role,
        "image": job.image,
        "command": _command(job, role),
        "workingDir": WORK,
        "env": _environment(job, role, server),
        "resources": _resources(job, role),
        "volumeMounts": mounts(job, role),
        "securityContext": dict(_NO_RIGHTS),
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


def _kernels(job: K8sJob) -> Document:
    """Kernels that were compiled with the image, where it has any: else every pod compiles for a minute or more."""
    copy = f"if [ -d {_COMPILED} ]; then cp -R {_COMPILED}/. {CACHE}; fi"
    return {
        "name": "kernels",
        "image": job.image,
        "command": ["sh", "-c", copy],
        "volumeMounts": [{"name": "cache", "mountPath": CACHE}],
        "securityContext": dict(_NO_RIGHTS),
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
    """The member answers as soon as it runs: that its script takes minutes to import is no failure."""
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
        "FLEET_HEALTH_PORT": str(HEALTH_PORT),
        **({"FLEET_GRACE": str(job.grace)} if job.grace else {}),
        **({"FLEET_SAVE_ON_STOP": job.save_on_stop} if job.save_on_stop else {}),
        "FLEET_KEY_DIR": KEYS,
        **({"FLEET_INSECURE": "1"} if job.insecure else {}),
        **_endurance(job, role),
    }
    # A replica that comes back when the job is over must not begin it anew; of workers the servers know it.
    told = [_annotation("FLEET_RESTART", FAILURES)] if job.coordinator and role != WORKER else []
    return [index, *told, *_variables(fixed), *given]


def _endurance(job: K8sJob, role: str) -> dict[str, str]:
    if job.log_size:  # workers, too: they wait for a server that is away
        found = {"FLEET_DURABILITY": "log", "FLEET_LOG_STORE": LOGS, "FLEET_LOG_RUN": job.run}
        return found if job.fsync_ms is None else {**found, "FLEET_FSYNC_MS": f"{job.fsync_ms:g}"}
    if job.coordinator and role != WORKER:
        return {"FLEET_COORDINATOR": job.coordinator, "FLEET_REPLICA": "1" if role == BACKUP else "0"}
    return {}


def _threads(job: K8sJob, role: str) -> dict[str, str]:
    """A pod that asks for cores may see all of its node's: torch would start a thread for each."""
    if role in (SERVER, BACKUP):
        return {"OMP_NUM_THREADS": "1"}
    cpus = job.worker.cpus
    if not cpus:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, int(cpus / max(1, job.ranks_per_node))))}


def _variables(values: dict[str, str]) -> list[Document]:
    return [{"name": name, "value": literal(value)} for name, value in values.items()]


def _annotation(variable: str, name: str) -> Document:
    """A variable that the Job's controller tells: "" where it does not."""
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}}}


def _resources(job: K8sJob, role: str) -> Document:
    asked = job.server if role in (SERVER, BACKUP) else job.worker
    memory = {} if asked.memory is None else {"memory": str(asked.memory)}
    cpus = {} if asked.cpus is None else {"cpu": f"{round(asked.cpus * 1000)}m"}
    gpus = {} if asked.gpus is None else {"nvidia.com/gpu": str(int(asked.gpus))}
    made = {"requests": {**cpus, **memory}, "limits": {**memory, **gpus}}
    return {name: values for name, values in made.items() if values}


def _security(job: K8sJob) -> Document:
    own = {"runAsUser": job.user, "runAsGroup": job.user, "fsGroup": job.user}
    return {
        "runAsNonRoot": True,
        **own,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _spread(job: K8sJob) -> Document:
    """Servers, with their backups, on as many machines as there are; so are the pods of a collective job."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {
            "matchLabels": {"app.kubernetes.io/instance": job.name},
            "matchExpressions": [
                {"key": "app.kubernetes.io/component", "operator": "In", "values": [SERVER, BACKUP, RANK]}
            ],
        },
    }
