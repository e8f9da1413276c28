"""The pods of a model server: unprivileged, with the user's volumes, and with secrets only as files of Secrets."""

from __future__ import annotations

import math

from torchfleet.launch.clusters.k8s.k8s_job import CACHE, KEYS, TMP, WORK, Document
from torchfleet.launch.clusters.k8s.pod_resources import BURST, milli
from torchfleet.launch.clusters.k8s.pod_template import NO_RIGHTS, kernels, labels, literal, placement, security
from torchfleet.launch.clusters.k8s.pod_volumes import KEY_MODE, PUBLIC_KEYS
from torchfleet.launch.clusters.k8s.serving import (
    HTTP_PORT,
    SERVING,
    SHARD,
    SHARD_BACKUP,
    SHARD_PORT,
    K8sServing,
    autoscaler,
    deployment,
    disruption_budget,
    inference_service,
    service,
    shard_service,
    stateful_set,
)

TOKEN, TLS = "/secrets/token", "/secrets/tls"
_FLEET = ("python", "-m", "torchfleet.observe.commands", "serve")
_SERVER = ("python", "-m", "torchfleet.server")
_POD_INDEX = "apps.kubernetes.io/pod-index"  # a label of the pods of a StatefulSet, since version 1.28
_PRIVATE_KEYS = {SERVING: "worker.key_secret", SHARD: "server.key_secret", SHARD_BACKUP: "server.key_secret"}


def plain_documents(job: K8sServing) -> list[Document]:
    """All objects of built-in kinds, in the order of their creation."""
    made = [service(job), disruption_budget(job, SERVING), *shard_documents(job)]
    return [*made, deployment(job, pod_template(job, SERVING)), autoscaler(job)]


def kserve_documents(job: K8sServing) -> list[Document]:
    """The same model server for KServe."""
    return [*shard_documents(job), inference_service(job, pod_template(job, SERVING))]


def shard_documents(job: K8sServing) -> list[Document]:
    if not job.num_shards:
        return []
    made = [shard_service(job)]
    for role in job.shard_roles:
        made += [disruption_budget(job, role), stateful_set(job, role, pod_template(job, role))]
    return made


def pod_template(job: K8sServing, role: str) -> Document:
    spec: Document = {
        "terminationGracePeriodSeconds": 20 + math.ceil(job.timeout_s),  # time to answer requests that have begun
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security(job),
        "initContainers": [kernels(job)],
        "containers": [_container(job, role)],
        "volumes": _volumes(job, role),
        "topologySpreadConstraints": [_spread(job, role)],
        **placement(job),
    }
    if job.service_account:
        spec["serviceAccountName"] = job.service_account
    found: Document = {"labels": labels(job, role)}
    if role == SERVING and not job.token_secret:  # a token must be configured in Prometheus
        scheme = "https" if job.tls_secret else "http"
        scrape = {"scrape": "true", "port": str(HTTP_PORT), "path": "/metrics", "scheme": scheme}
        found["annotations"] = {f"prometheus.io/{name}": value for name, value in scrape.items()}
    return {"metadata": found, "spec": spec}


def _container(job: K8sServing, role: str) -> Document:
    is_serving = role == SERVING
    cpus, memory = (job.cpus, job.memory) if is_serving else (job.shard_cpus, job.shard_memory)
    index = {"fieldPath": f"metadata.labels['{_POD_INDEX}']"}
    defaults = {"PYTHONUNBUFFERED": "1", "HOME": WORK, "XDG_CACHE_HOME": CACHE}
    given = {**defaults, "OMP_NUM_THREADS": str(max(1, int(cpus))), **dict(job.environment)}
    made: Document = {
        "name": role,
        "image": job.image,
        "command": _serve(job) if is_serving else _serve_shard(job),
        "workingDir": WORK,
        "env": [
            *([] if is_serving else [{"name": "FLEET_INDEX", "valueFrom": {"fieldRef": index}}]),
            *({"name": name, "value": literal(value)} for name, value in given.items()),
        ],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}]
        if is_serving
        else [{"name": "fleet", "containerPort": SHARD_PORT}],
        "resources": {
            "requests": {"cpu": milli(cpus), "memory": str(memory)},
            "limits": {"cpu": milli(BURST * cpus), "memory": str(memory)},
        },
        "volumeMounts": _mounts(job, role),
        "securityContext": dict(NO_RIGHTS),
        **(_http_probes(job) if is_serving else _socket_probes()),
    }
    if job.env_secrets:
        made["envFrom"] = [{"secretRef": {"name": name}} for name in job.env_secrets]
    return made


def _serve(job: K8sServing) -> list[str]:
    found = [*_FLEET, literal(job.model), "--host", "0.0.0.0", "--port", str(HTTP_PORT)]
    if job.token_secret:
        found += ["--token_file", f"{TOKEN}/token"]
    if job.tls_secret:
        found += ["--tls_cert", f"{TLS}/tls.crt", "--tls_key", f"{TLS}/tls.key"]
    for option, role in zip(("--shards", "--backups"), job.shard_roles, strict=False):
        found += [option, job.shard_endpoints(role)]
    if job.num_shards:
        found += ["--key_dir", KEYS]
    return [*found, *(literal(part) for part in job.arguments)]


def _serve_shard(job: K8sServing) -> list[str]:
    endpoint = ["--endpoint", f"tcp://0.0.0.0:{SHARD_PORT}", "--key_dir", KEYS]
    return [*_SERVER, "--read_only", literal(job.model), "--shard", f"$(FLEET_INDEX)/{job.num_shards}", *endpoint]


def _http_probes(job: K8sServing) -> Document:
    """A pod is ready when it has loaded its model. The start may take half an hour, for models of many files."""
    scheme = {"scheme": "HTTPS"} if job.tls_secret else {}

    def probe(path: str, seconds: int, failures: int) -> Document:
        get = {"path": path, "port": "http", **scheme}
        return {"httpGet": get, "timeoutSeconds": 5, "periodSeconds": seconds, "failureThreshold": failures}

    return {
        "startupProbe": probe("/v2/health/ready", 5, 360),
        "livenessProbe": probe("/v2/health/live", 10, 6),
        "readinessProbe": probe("/v2/health/ready", 5, 1),
        # Requests still arrive for a moment after a pod is told to end.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
    }


def _socket_probes() -> Document:
    """A read-only server starts to listen when it has loaded its rows."""
    probe: Document = {"tcpSocket": {"port": "fleet"}, "timeoutSeconds": 5}
    return {
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 360},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**probe, "periodSeconds": 5},
    }


def _secrets(job: K8sServing, role: str) -> dict[str, tuple[str, str, list[str]]]:
    """Return by volume name: the Secret, the path where it is mounted, and the keys of the Secret that are mounted."""
    found: dict[str, tuple[str, str, list[str]]] = {}
    if role == SERVING and job.token_secret:
        found["token"] = job.token_secret, TOKEN, ["token"]
    if role == SERVING and job.tls_secret:
        found["tls"] = job.tls_secret, TLS, ["tls.crt", "tls.key"]
    if job.key_secret:
        found["keys"] = job.key_secret, KEYS, [*PUBLIC_KEYS, _PRIVATE_KEYS[role]]
    return found


def _mounts(job: K8sServing, role: str) -> list[Document]:
    found: list[Document] = [{"name": n, "mountPath": at} for n, at in (("work", WORK), ("tmp", TMP), ("cache", CACHE))]
    found += [{"name": n, "mountPath": at, "readOnly": True} for n, (_, at, _) in _secrets(job, role).items()]
    for number, claim in enumerate(job.claims):
        more = {"readOnly": True} if claim.is_read_only else {}
        found.append({"name": f"claim-{number}", "mountPath": claim.path, **more})
    return found


def _volumes(job: K8sServing, role: str) -> list[Document]:
    found: list[Document] = [{"name": name, "emptyDir": {}} for name in ("work", "tmp", "cache")]
    for name, (secret, _, files) in _secrets(job, role).items():
        items = [{"key": file, "path": file} for file in files]
        found.append({"name": name, "secret": {"secretName": secret, "defaultMode": KEY_MODE, "items": items}})
    for number, claim in enumerate(job.claims):
        found.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim.name}})
    return found


def _spread(job: K8sServing, role: str) -> Document:
    """Spread the pods of a role over nodes, as far as possible."""
    own = {"app.kubernetes.io/instance": job.name, "app.kubernetes.io/component": role}
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": own},
    }
