"""The objects of a model server: a Service, a Deployment, an autoscaler and a disruption budget, or one KServe
InferenceService in their place; and read-only servers for the shards of tables that do not fit one pod."""

from __future__ import annotations

from dataclasses import dataclass

from torchfleet.launch.clusters.k8s.k8s_job import Claim, Document
from torchfleet.launch.clusters.k8s.pod_resources import CPUS, MEMORY
from torchfleet.launch.clusters.k8s.pod_template import k8s_object, labels

HTTP_PORT, SHARD_PORT = 8000, 7000
SERVING, SHARD, SHARD_BACKUP = "serving", "shard", "shard-backup"  # the roles of pods


@dataclass(frozen=True)
class K8sServing:
    """Everything that the manifests of a model server depend on."""

    name: str
    image: str
    model: str  # a path in the pods, or a URL
    arguments: tuple[str, ...] = ()  # more options of `fleet serve`
    namespace: str | None = None
    min_replicas: int = 2
    max_replicas: int = 10
    timeout_s: float = 10.0  # of a request, as in `fleet serve`
    cpu_target: int = 70  # percent of the requested cores at which the autoscaler adds pods
    cpus: float = CPUS
    memory: int = MEMORY
    num_shards: int = 0  # 0: every pod has all rows
    has_backups: bool = False  # every shard has a second server
    shard_cpus: float = CPUS
    shard_memory: int = MEMORY
    claims: tuple[Claim, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    env_secrets: tuple[str, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[dict[str, str], ...] = ()
    service_account: str | None = None
    priority_class: str | None = None
    user: int = 10_001
    token_secret: str | None = None  # a Secret with the key `token`
    tls_secret: str | None = None  # a Secret of type kubernetes.io/tls
    key_secret: str | None = None  # a Secret with the files of `fleetrun --keygen`, for shards

    @property
    def shard_roles(self) -> tuple[str, ...]:
        return () if not self.num_shards else (SHARD, SHARD_BACKUP) if self.has_backups else (SHARD,)

    def shard_endpoints(self, role: str) -> str:
        """The addresses of all servers of a role, as `fleet serve --shards` takes them: names of a StatefulSet's pods
        in their headless Service."""
        hosts = [f"{self.name}-{role}-{i}.{self.name}-shards" for i in range(self.num_shards)]
        return ",".join(f"{host}:{SHARD_PORT}" for host in hosts)


def service(job: K8sServing) -> Document:
    made = k8s_object(job, "v1", "Service", job.name)
    made["spec"] = {
        "selector": selector(job, SERVING),
        "ports": [{"name": "https" if job.tls_secret else "http", "port": HTTP_PORT, "targetPort": "http"}],
    }
    return made


def deployment(job: K8sServing, template: Document) -> Document:
    """The Deployment has no number of replicas: the autoscaler sets it. A new pod is ready before an old one ends."""
    made = k8s_object(job, "apps/v1", "Deployment", job.name)
    made["spec"] = {
        "selector": {"matchLabels": selector(job, SERVING)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "progressDeadlineSeconds": 3600,  # a large model takes long to load
        "template": template,
    }
    return made


def autoscaler(job: K8sServing) -> Document:
    made = k8s_object(job, "autoscaling/v2", "HorizontalPodAutoscaler", job.name)
    target = {"type": "Utilization", "averageUtilization": job.cpu_target}
    made["spec"] = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": job.name},
        "minReplicas": job.min_replicas,
        "maxReplicas": job.max_replicas,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return made


def disruption_budget(job: K8sServing, role: str) -> Document:
    """At most one pod of a role may be evicted at a time."""
    name = job.name if role == SERVING else f"{job.name}-{role}"
    made = k8s_object(job, "policy/v1", "PodDisruptionBudget", name)
    made["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": selector(job, role)}}
    return made


def inference_service(job: K8sServing, template: Document) -> Document:
    """The same pods under KServe, which creates the Deployment, the Service and the autoscaler itself, and gives the
    pods the labels and annotations of this object."""
    made = k8s_object(job, "serving.kserve.io/v1beta1", "InferenceService", job.name)
    mode = {"serving.kserve.io/deploymentMode": "RawDeployment"}  # without Knative
    made["metadata"] |= {"labels": template["metadata"]["labels"]}
    made["metadata"]["annotations"] = {**mode, **template["metadata"].get("annotations", {})}
    pod = template["spec"]
    scaling = {
        "minReplicas": job.min_replicas,
        "maxReplicas": job.max_replicas,
        "scaleMetric": "cpu",
        "scaleTarget": job.cpu_target,
    }
    # KServe finds the container that serves by its name.
    container = {**pod["containers"][0], "name": "kserve-container"}
    made["spec"] = {"predictor": {**scaling, **pod, "containers": [container]}}
    return made


def shard_service(job: K8sServing) -> Document:
    """The headless Service that gives every server of a shard a DNS name."""
    made = k8s_object(job, "v1", "Service", f"{job.name}-shards")
    own = {name: value for name, value in labels(job).items() if name != "app.kubernetes.io/managed-by"}
    made["spec"] = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": own}
    return made


def stateful_set(job: K8sServing, role: str, template: Document) -> Document:
    """The servers of all shards, one pod each. They load at the same time."""
    made = k8s_object(job, "apps/v1", "StatefulSet", f"{job.name}-{role}")
    made["spec"] = {
        "serviceName": f"{job.name}-shards",
        "replicas": job.num_shards,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector(job, role)},
        "template": template,
    }
    return made


def selector(job: K8sServing, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/instance": job.name, "app.kubernetes.io/component": role}
