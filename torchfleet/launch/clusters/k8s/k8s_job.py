"""A job for Kubernetes: the number of pods of each role, their names, and what each pod needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchfleet.base.errors import RoleError
from torchfleet.launch.job_spec import Resources
from torchfleet.ps.net.replica_channels import SEPARATOR

Document = dict[str, Any]  # a Kubernetes object, or a part of one
SERVER, BACKUP, WORKER, RANK, OWNER = "server", "backup", "worker", "rank", "owner"
PORT, HEALTH_PORT, MASTER_PORT = 7000, 7001, 6170
KEYS, SCRIPT, WORK, TMP, CACHE, LOGS = "/keys", "/script", "/job", "/tmp", "/cache", "/server-log"
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_NAME = 40  # characters; "-server-9999-0-0" is appended, and a host name has at most 63


@dataclass(frozen=True)
class Claim:
    """An existing volume, and the path where pods mount it."""

    name: str
    path: str
    is_read_only: bool = False


class Application(Protocol):
    """What the pods of a job and those of a model server have in common."""

    @property
    def name(self) -> str: ...
    @property
    def image(self) -> str: ...
    @property
    def namespace(self) -> str | None: ...
    @property
    def pull_secrets(self) -> tuple[str, ...]: ...
    @property
    def node_selector(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def tolerations(self) -> tuple[dict[str, str], ...]: ...
    @property
    def priority_class(self) -> str | None: ...
    @property
    def user(self) -> int: ...


@dataclass(frozen=True)
class K8sJob:
    """Everything that the manifests of a job depend on, except its keys and the files of its script."""

    name: str
    image: str
    command: tuple[str, ...]  # the path of the script in a pod, or -m and a module; then the arguments
    num_servers: int = 0
    num_workers: int = 0  # of an elastic job: the maximum
    min_workers: int = 0  # an elastic job begins with this number of workers; 0: not elastic
    num_nodes: int = 0  # the number of pods of a collective job
    ranks_per_node: int = 0
    namespace: str | None = None
    server: Resources = field(default_factory=Resources)
    worker: Resources = field(default_factory=Resources)  # in a collective job: of one pod with all of its ranks
    claims: tuple[Claim, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    env_secrets: tuple[str, ...] = ()  # Secrets whose keys become environment variables, such as credentials of a store
    pull_secrets: tuple[str, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[dict[str, str], ...] = ()
    service_account: str | None = None
    priority_class: str | None = None
    is_spread_required: bool = False  # a pod waits while it could run only on nodes that violate the spread
    max_restart: int = 0
    max_job_restart: int = 0  # restarts of the whole job, which need a JobSet
    log_size: str | None = None  # of a server's log, with --durability log; None: servers keep no log
    storage_class: str | None = None  # of the volumes of logs
    has_shared_logs: bool = False  # with replicas: a volume for both logs of a server, which many nodes can mount
    fsync_ms: float | None = None
    run: str = ""  # identifies this run to logs and to the coordinator
    coordinator: str | None = None  # with replicas
    waits_for_backups: bool = True  # with replicas: workers begin when every server has its backup
    is_jobset: bool = False
    save_on_stop: str | None = None  # where worker 0 saves when its pod is terminated
    grace: int = 0  # seconds that worker 0 has for saving; 0: pods end at once
    ttl: int | None = 86_400  # seconds that a finished Job is kept; None: until it is deleted
    cleans_on: str | None = None  # "Complete" or "Failed": Jobs that end so are removed at once, by the owner's pod
    has_owner: bool = True  # a pod makes the Jobs the owners of all other objects, so that these are removed with them
    user: int = 10_001
    metrics_port: int | None = None  # of the first process of a pod
    has_json_logs: bool = False
    servers_run_script: bool = False  # otherwise a server pod reads in the script's source whether to run it
    insecure: bool = False  # workers of hybrid mode, and ranks, communicate without encryption; servers have keys

    @property
    def is_collective(self) -> bool:
        return self.num_nodes > 0

    @property
    def has_script_volume(self) -> bool:
        """Whether the script is in a ConfigMap instead of in the image."""
        return self.command[0].startswith(f"{SCRIPT}/")

    @property
    def server_roles(self) -> tuple[str, ...]:
        """The roles that every server has: with replicas also its backup."""
        return (SERVER, BACKUP) if self.coordinator else (SERVER,)

    def log_claim(self, role: str, index: int) -> str:
        """Return the name of the claim for the volume with the log of a server or of its backup."""
        is_shared = role == SERVER or self.has_shared_logs
        return f"{self.name}-log-{index}" if is_shared else f"{self.name}-log-{index}-backup"

    @property
    def server_endpoints(self) -> str:
        """The value of FLEET_SERVER_ENDPOINTS: host and port of every server, each followed by those of its backup."""
        return ",".join(self._places(i) for i in range(self.num_servers))

    @property
    def master(self) -> str:
        """Where the ranks of a collective job meet: the pod of node 0."""
        return f"{self._host(RANK, 0)}:{MASTER_PORT}"

    def _places(self, index: int) -> str:
        return SEPARATOR.join(f"{self._host(role, index)}:{PORT}" for role in self.server_roles)

    def _host(self, role: str, index: int) -> str:
        """Return a pod's DNS name inside its namespace: its host name and the name of the headless Service.

        The host name of a pod of an Indexed Job is the Job's name and the pod's index; a JobSet puts the number of the
        Job between them. Each server or backup with a log is a Job of its own, because each has its own volume.
        """
        jobs = "-0" if self.is_jobset else ""
        if role in (SERVER, BACKUP) and self.log_size:
            return f"{self.name}-{role}-{index}{jobs}-0.{self.name}"
        return f"{self.name}-{role}{jobs}-{index}.{self.name}"


def check_name(name: str, option: str, most: int = _MOST_NAME) -> str:
    """Return `name` if it is valid as the name of a Service and of a host. Raises RoleError otherwise."""
    if len(name) > most or not _LABEL.fullmatch(name):
        raise RoleError(
            f"{option}: expected at most {most} small letters, digits and -, beginning with a letter and not ending "
            f"with -; found {name!r}"
        )
    return name


def name_of(script: str) -> str:
    """Derive the name of a job from the name of its script."""
    stem = script.rpartition("/")[2].removesuffix(".py").lower()
    found = re.sub(r"[^a-z0-9]+", "-", stem)[:_MOST_NAME].strip("-")
    return found if _LABEL.fullmatch(found) else f"job-{found}".strip("-")[:_MOST_NAME].strip("-")
