"""What pods export to the tools of a cluster: metrics for Prometheus, and logs as JSON lines."""

from __future__ import annotations

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.json_lines import VARIABLE
from torchfleet.base.monitor.prometheus.metrics_port import HOST, port_of
from torchfleet.base.monitor.prometheus.metrics_port import PORT as METRICS_PORT
from torchfleet.launch.clusters.k8s.k8s_job import HEALTH_PORT, MASTER_PORT, PORT, RANK, Document, K8sJob

_TAKEN = (PORT, HEALTH_PORT, MASTER_PORT)
_EVERYWHERE = "0.0.0.0"  # Prometheus connects from outside the pod


def metrics_port_of(text: str | None, host: str | None, num: int) -> int | None:
    """Parse --metrics_port for a pod with `num` processes. Raises RoleError."""
    if host is not None:
        raise RoleError(
            f"--metrics_host {host}: pods serve their metrics to the network of the cluster; leave it out, or unset "
            f"{HOST}"
        )
    if text is None:
        return None
    port = port_of(text, "--metrics_port")
    taken = [str(other) for other in _TAKEN if port <= other < port + num]
    if taken or port + num > 1 << 16:
        why = f"port {taken[0]} is taken" if taken else "ports end at 65535"
        raise RoleError(f"--metrics_port {port}: a pod needs {num} from there on, and {why}. Give another one.")
    return port


def ports(job: K8sJob, role: str) -> list[Document]:
    """Return one metrics port for each process of a pod."""
    if job.metrics_port is None:
        return []
    num = job.ranks_per_node if role == RANK else 1
    names = ["metrics", *(f"metrics-{i}" for i in range(1, num))]
    return [{"name": name, "containerPort": job.metrics_port + i} for i, name in enumerate(names)]


def scrape_annotations(job: K8sJob) -> Document:
    """The annotations by which many Prometheus setups find pods. In a pod with several ranks they name the port of
    the first rank.
    """
    if job.metrics_port is None:
        return {}
    found = {"scrape": "true", "port": str(job.metrics_port), "path": "/metrics"}
    return {"annotations": {f"prometheus.io/{name}": value for name, value in found.items()}}


def variables(job: K8sJob) -> dict[str, str]:
    found = {} if job.metrics_port is None else {METRICS_PORT: str(job.metrics_port), HOST: _EVERYWHERE}
    return {**found, VARIABLE: "json"} if job.has_json_logs else found


def ingress(job: K8sJob) -> list[Document]:
    """The rule of the NetworkPolicy that opens the metrics ports, and no others, to all clients."""
    found = [] if job.metrics_port is None else ports(job, RANK if job.is_collective else "")
    return [{"ports": [{"protocol": "TCP", "port": port["containerPort"]} for port in found]}] if found else []
