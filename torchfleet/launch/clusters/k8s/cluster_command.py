"""`fleetrun k8s apply`, `status`, `logs` and `delete`: a job of a cluster, by its folder of manifests or its name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.base.printable import say
from torchfleet.launch.clusters.k8s.k8s_api import KINDS, Cluster
from torchfleet.launch.clusters.k8s.k8s_job import Document, check_name
from torchfleet.launch.clusters.k8s.k8s_yaml import KUSTOMIZATION, read_stream
from torchfleet.launch.clusters.k8s.pod_logs import JobLogs
from torchfleet.launch.clusters.k8s.pod_states import COMPONENT, job_ends, pod_states

_INSTANCE = "app.kubernetes.io/instance"


def run_action(action: str, arguments: Sequence[str]) -> int:
    """Run one of ACTIONS and return its exit status. Raises FleetError."""
    parser = argparse.ArgumentParser(prog=f"fleetrun k8s {action}", description=ACTIONS[action].__doc__)
    parser.add_argument("job", help="the folder of manifests" + ("" if action == "apply" else ", or the job's name"))
    parser.add_argument("--namespace", help="(default: that of the kubeconfig's context)")
    parser.add_argument("--kubeconfig", metavar="FILE", help="(default: KUBECONFIG, else ~/.kube/config)")
    parser.add_argument("--context", help="of the kubeconfig (default: its current one)")
    if action == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="until all pods have ended")
        parser.add_argument("--role", choices=("server", "backup", "worker", "rank"), help="of these alone")
        parser.add_argument("--tail", type=int, metavar="N", help="the last lines of each (default: all)")
    options = parser.parse_args(arguments)
    return ACTIONS[action](options)


def apply(options: argparse.Namespace) -> int:
    """Make all objects of a folder of manifests, or change them; twice is as once."""
    documents = _read(Path(options.job))
    namespace = options.namespace or documents[0]["metadata"].get("namespace")
    cluster = Cluster(options.kubeconfig, options.context, namespace)
    for document in documents:
        done = cluster.apply(document)
        print(f"{document['kind'].lower()}/{document['metadata']['name']} {done}", flush=True)
    print(f"applied to {cluster.host}, namespace {cluster.namespace}; next: fleetrun k8s status {_job_of(documents)}")
    return 0


def status(options: argparse.Namespace) -> int:
    """Every role of a job: its pod, phase, how often it was replaced, and why. Status 1 if a Job has failed."""
    name, cluster = _found(options)
    states = pod_states(cluster.items("Pod", _labels(name)))
    jobs = [job for kind in ("JobSet", "Job") for job in cluster.items(kind, _labels(name))]
    if not states and not jobs:
        raise RoleError(f"no job {name!r} in the namespace {cluster.namespace!r} of {cluster.host}")
    rows = [("ROLE", "POD", "PHASE", "RESTARTS", "NODE", "REASON")]
    rows += [(s.title, s.pod, s.phase, str(s.restarts), s.node or "-", s.reason) for s in states]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
        say("  ".join([*cells, row[-1]]).rstrip())
    failed, finished = job_ends(jobs)
    for text in failed:
        say(f"failed: {text}")
    if jobs and len(finished) == len(jobs):
        say("finished: all Jobs are complete")
    return 1 if failed else 0


def logs(options: argparse.Namespace) -> int:
    """The output of all pods of a job, each line with its role."""
    name, cluster = _found(options)
    labels = {**_labels(name), COMPONENT: options.role} if options.role else _labels(name)
    copied = JobLogs(cluster, labels, say, options.tail)
    if not (copied.follow() if options.follow else copied.once()):
        raise RoleError(f"no pods of {name!r} in the namespace {cluster.namespace!r} of {cluster.host}")
    return 0


def delete(options: argparse.Namespace) -> int:
    """Remove all objects of a job: Jobs with their pods, Service, Secret, ConfigMap, and the volumes of logs."""
    name, cluster = _found(options)
    total = 0
    for kind in KINDS:
        num = cluster.remove(kind, _labels(name))
        total += num
        if num:
            print(f"{kind.lower()}: {num} deleted", flush=True)
    if not total:
        raise RoleError(f"no job {name!r} in the namespace {cluster.namespace!r} of {cluster.host}")
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "apply": apply,
    "status": status,
    "logs": logs,
    "delete": delete,
}


def _found(options: argparse.Namespace) -> tuple[str, Cluster]:
    """The job's name, and the cluster to ask about it."""
    namespace = options.namespace
    if Path(options.job).is_dir():
        documents = _read(Path(options.job))
        name = _job_of(documents)
        namespace = namespace or documents[0]["metadata"].get("namespace")
    else:
        name = check_name(options.job, "the job's name, or its folder")
    return name, Cluster(options.kubeconfig, options.context, namespace)


def _labels(name: str) -> dict[str, str]:
    return {_INSTANCE: name, "app.kubernetes.io/managed-by": "fleetrun"}


def _read(folder: Path) -> list[Document]:
    """The objects of all files of a folder, in the order of their names."""
    if not folder.is_dir():
        raise RoleError(f"expected a folder of manifests, as `fleetrun k8s -o DIR` writes it; found none at {folder}")
    paths = [path for path in sorted(folder.glob("*.yaml")) if path.name != KUSTOMIZATION]
    documents = [document for path in paths for document in read_stream(path.read_text(), str(path))]
    if not documents:
        raise RoleError(f"{folder} has no manifests: expected files *.yaml, as `fleetrun k8s -o DIR` writes them")
    return documents


def _job_of(documents: Sequence[Document]) -> str:
    names = {str((document["metadata"].get("labels") or {}).get(_INSTANCE)) for document in documents}
    if len(names) != 1 or "None" in names:
        raise RoleError(
            f"expected objects of one job, by the label {_INSTANCE}; found {', '.join(sorted(names)) or 'none'}"
        )
    return names.pop()
