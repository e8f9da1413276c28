"""The options of `fleetrun k8s`, and the job made from them."""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.job_options import add_counts, add_resources, add_script, job_resources
from torchfleet.launch.clusters.k8s.k8s_job import SCRIPT, K8sJob, check_name, name_of
from torchfleet.launch.clusters.k8s.pod_metrics import metrics_port_of
from torchfleet.launch.clusters.k8s.pod_settings import (
    claims,
    object_name,
    pairs,
    quantity,
    toleration,
    variables,
)
from torchfleet.observe.watch.watchers import add_exports
from torchfleet.ps.coordination.coordinators import make_coordinator

FORMATS = ("plain", "kustomize", "jobset")
_MOST = 10_000  # pods of a role


def k8s_parser() -> argparse.ArgumentParser:
    """Return a parser with the options of the job, followed by those of Kubernetes."""
    made = argparse.ArgumentParser(
        prog="fleetrun k8s",
        description="Write the manifests of a job for Kubernetes, of built-in kinds: with -o DIR into a folder, else "
        "to standard output. kubectl takes them: kubectl apply --server-side -f DIR.",
        allow_abbrev=False,
    )
    made.add_argument("--image", required=True, help="the image of all pods: torchfleet is installed in it")
    add_counts(made)
    made.add_argument("--nproc_per_node", type=int, metavar="N", help="a collective job: ranks of a pod")
    made.add_argument("--nnodes", type=int, metavar="N", help="a collective job: pods (default: 1)")
    add_resources(made)
    made.add_argument("--gpus", dest="worker_gpus", type=float, metavar="N", help="as --worker_gpus: of a pod")
    _add_faults(made.add_argument_group("when something fails"))
    _add_pods(made.add_argument_group("pods"))
    _add_output(made.add_argument_group("output"))
    add_exports(made.add_argument_group("watching"))
    add_script(made)
    return made


def _add_faults(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max_restart", type=int, default=0, metavar="N", help="replace a failed pod so often")
    group.add_argument("--max_job_restart", type=int, default=0, metavar="N", help="with --format jobset: of all pods")
    group.add_argument("--durability", choices=("none", "log"), default="none", help="log: each server has a volume")
    group.add_argument("--log_size", metavar="SIZE", help="of such a volume, as Kubernetes writes it (default: 10Gi)")
    group.add_argument("--storage_class", metavar="NAME", help="of such a volume (default: the cluster's)")
    group.add_argument("--fsync_ms", type=float, metavar="MS", help="as for fleetrun: changes a power loss may take")
    group.add_argument("--replicas", type=int, choices=(1, 2), default=1, help="2: every server has a backup")
    group.add_argument("--coordinator", metavar="URL", help="with --replicas 2: etcd://host:port/NAME")
    group.add_argument("--save_on_stop", metavar="DIR", help="worker 0 saves there when its pod is asked to end")
    group.add_argument("--grace", type=int, metavar="SECONDS", help="to save in then (default: 60 with --save_on_stop)")
    group.add_argument("--ttl", type=int, default=86_400, metavar="SECONDS", help="finished Jobs are kept so long")


def _add_pods(group: argparse._ArgumentGroup) -> None:
    more: dict[str, str] = {
        "--pvc": "CLAIM=/PATH[:ro]",
        "--node_selector": "LABEL=VALUE",
        "--toleration": "KEY[=VALUE][:EFFECT]",
        "--env": "NAME=VALUE",
        "--env_secret": "SECRET",
        "--image_pull_secret": "SECRET",
    }
    says = {
        "--pvc": "a volume that is there, in all pods at this path",
        "--node_selector": "nodes with this label",
        "--toleration": "nodes with this taint, too",
        "--env": "a variable of all pods; nothing secret",
        "--env_secret": "every key of this Secret is a variable, such as those of a store",
        "--image_pull_secret": "for the registry of the image",
    }
    for option, metavar in more.items():
        text = f"{says[option]}; may be given several times"
        group.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    group.add_argument("--user", type=int, default=10_001, metavar="UID", help="of all processes (default: 10001)")
    group.add_argument("--insecure", action="store_true", help="ranks, or workers of hybrid mode, talk without keys")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", help="of the job and all its objects (default: that of the script)")
    group.add_argument("--namespace", metavar="NAME", help="(default: that of whoever applies the manifests)")
    group.add_argument("--format", choices=FORMATS, default="plain", help="(default: plain)")
    group.add_argument("-o", "--output", metavar="DIR", help="a new or empty folder for the manifests")
    group.add_argument("--in_image", action="store_true", help="the script is a path in the image")
    group.add_argument("--script_alone", action="store_true", help="send the script without what it imports")
    group.add_argument(
        "--files",
        action="append",
        default=[],
        metavar="PATH",
        help="send this file, or all files of this folder, too; below the script's folder; may be given several times",
    )
    group.add_argument("--dry_run", action="store_true", help="print every pod's command and environment, nothing else")


def job_of(options: argparse.Namespace) -> K8sJob:
    """Return the job that these options describe. Raises RoleError for invalid combinations."""
    _check(options)
    resources = job_resources(options)
    if resources["worker"].gpus is not None and resources["worker"].gpus != int(resources["worker"].gpus):
        raise RoleError(f"--gpus: Kubernetes gives whole GPUs, found {resources['worker'].gpus:g}")
    is_collective = options.nproc_per_node is not None or options.nnodes is not None
    counts = _ranks(options) if is_collective else _counts(options)
    run = secrets.token_hex(4)
    return K8sJob(
        name=check_name(options.name if options.name is not None else name_of(options.script), "--name"),
        image=options.image,
        command=_command(options),
        **counts,
        namespace=check_name(options.namespace, "--namespace", 63) if options.namespace is not None else None,
        server=resources["server"],
        worker=resources["worker"],
        claims=claims(options.pvc),
        environment=variables(options.env),
        env_secrets=tuple(object_name("--env_secret", text) for text in options.env_secret),
        pull_secrets=tuple(object_name("--image_pull_secret", text) for text in options.image_pull_secret),
        node_selector=pairs("--node_selector", options.node_selector),
        tolerations=tuple(toleration(text) for text in options.toleration),
        max_restart=options.max_restart,
        max_job_restart=options.max_job_restart,
        log_size=quantity("--log_size", options.log_size or "10Gi") if options.durability == "log" else None,
        storage_class=object_name("--storage_class", options.storage_class) if options.storage_class else None,
        fsync_ms=options.fsync_ms,
        run=run,
        coordinator=f"{options.coordinator}-{run}" if options.replicas == 2 else None,
        is_jobset=options.format == "jobset",
        grace=options.grace or (60 if options.save_on_stop else 0),
        save_on_stop=options.save_on_stop,
        ttl=options.ttl,
        user=options.user,
        metrics_port=metrics_port_of(options.metrics_port, options.metrics_host, counts.get("ranks_per_node", 1)),
        has_json_logs=options.log_format == "json",
        insecure=options.insecure,
    )


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    if options.module:
        return ("-m", options.script, *options.arguments)
    script = options.script if options.in_image else f"{SCRIPT}/{Path(options.script).name}"
    return (script, *options.arguments)


def _counts(options: argparse.Namespace) -> dict[str, int]:
    counts = {"--server_num": options.server_num, "--worker_num": options.worker_num}
    found = {option: 1 if number is None else number for option, number in counts.items()}
    for option, number in found.items():
        if not isinstance(number, int) or not 1 <= number <= _MOST:
            raise RoleError(f"{option}: expected a number of pods from 1 to {_MOST:,}, found {number}")
    return {"num_servers": found["--server_num"], "num_workers": found["--worker_num"]}


def _ranks(options: argparse.Namespace) -> dict[str, int]:
    gpus = options.worker_gpus
    ranks = options.nproc_per_node if options.nproc_per_node is not None else int(gpus or 1)
    nodes = 1 if options.nnodes is None else options.nnodes
    for option, number in (("--nproc_per_node", ranks), ("--nnodes", nodes)):
        if not 1 <= number <= _MOST:
            raise RoleError(f"{option}: expected a number from 1 to {_MOST:,}, found {number}")
    if not options.insecure:
        raise RoleError(
            "ranks of several pods meet by torch.distributed, which neither encrypts nor authenticates. The manifests "
            "have a NetworkPolicy that lets only pods of this job in; say --insecure if your cluster enforces it, or "
            "if nobody else is on its network."
        )
    return {"num_nodes": nodes, "ranks_per_node": ranks}


def _check(options: argparse.Namespace) -> None:
    if options.script is None:
        raise RoleError("no script given. Usage: fleetrun k8s --image IMAGE --server_num 2 --worker_num 4 train.py")
    if not options.image.strip() or options.image.startswith("-"):
        raise RoleError(f"--image: expected the name of an image, found {options.image!r}")
    if not options.module and not options.in_image and not Path(options.script).is_file():
        raise RoleError(f"no script at {options.script}; for a path in the image add --in_image")
    for name, least in (("max_restart", 0), ("max_job_restart", 0), ("grace", 1), ("ttl", 0), ("user", 1)):
        number = getattr(options, name)
        if number is not None and number < least:
            raise RoleError(f"--{name} must be at least {least}, found {number}")
    if options.max_job_restart and options.format != "jobset":
        raise RoleError(
            f"--max_job_restart {options.max_job_restart}: Jobs by themselves cannot start each other again; JobSet's "
            "controller can: --format jobset"
        )
    _check_faults(options)
    _check_kind(options)


def _check_faults(options: argparse.Namespace) -> None:
    is_logged = options.durability == "log"
    for name in ("log_size", "storage_class", "fsync_ms"):
        if getattr(options, name) is not None and not is_logged:
            raise RoleError(f"--{name} is about the log of servers, and there is none: add --durability log")
    if options.fsync_ms is not None and not 0 <= options.fsync_ms <= 60_000:
        raise RoleError(f"--fsync_ms must be a number of milliseconds from 0 to 60000, found {options.fsync_ms:g}")
    if is_logged and options.replicas == 2:
        raise RoleError("--durability log and --replicas 2 exclude each other: use one of them")
    if (options.replicas == 2) != (options.coordinator is not None):
        raise RoleError(
            "--replicas 2 and --coordinator etcd://host:port/NAME belong together: a third party decides which replica "
            "is primary"
        )
    if options.coordinator is not None:
        make_coordinator(options.coordinator)  # raises if the URL is invalid


def _check_kind(options: argparse.Namespace) -> None:
    given = [name for name in ("nproc_per_node", "nnodes") if getattr(options, name) is not None]
    others: Sequence[str] = (
        "server_num", "worker_num", "server_cpus", "server_memory", "coordinator", "save_on_stop", "grace",
    )  # fmt: skip
    both = [name for name in others if getattr(options, name) is not None]
    both += ["durability"] if options.durability != "none" else []
    if given and both:
        raise RoleError(f"--{given[0]} makes a collective job, --{both[0]} one with servers: use one of them")
    if options.module and options.script_alone:
        raise RoleError("--script_alone is about a script, -m about a module, which is in the image")
    if options.files and (options.module or options.in_image):
        raise RoleError(f"--files {options.files[0]} is sent with a script, and this one is in the image: put it there")
    if options.output is not None and options.dry_run:
        raise RoleError("--dry_run writes nothing, -o writes manifests: use one of them")
    if options.format == "kustomize" and options.output is None and not options.dry_run:
        raise RoleError("--format kustomize is a folder: add -o DIR")
    if not re.fullmatch(r"[^\s]+", options.image):
        raise RoleError(f"--image: expected a name without spaces, found {options.image!r}")
