"""The options of `fleetrun k8s`, and the job made from them."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchfleet.base.command_line import Parser
from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.job_options import add_counts, add_resources, add_script, job_resources
from torchfleet.launch.clusters.k8s.adopt import COMPLETE, FAILED
from torchfleet.launch.clusters.k8s.k8s_job import SCRIPT, K8sJob, check_name, name_of
from torchfleet.launch.clusters.k8s.pod_metrics import metrics_port_of
from torchfleet.launch.clusters.k8s.pod_settings import (
    EXPORTS,
    RESERVED,
    claims,
    object_name,
    pairs,
    quantity,
    toleration,
    variables,
)
from torchfleet.launch.clusters.k8s_checks import check
from torchfleet.launch.server_command import add_option as add_script_option
from torchfleet.observe.watch.watchers import add_exports

FORMATS = ("plain", "kustomize", "jobset")
CLEANING = ("Always", "Never", "OnCompletion", "OnFailure")
_CLEANS_ON = {"OnCompletion": COMPLETE, "OnFailure": FAILED}
_DAY = 86_400
_LEAST_TTL = 600  # seconds for the owner's pod to find the Jobs: it cannot make a removed Job an owner
_MOST = 10_000  # pods of a role


def k8s_parser() -> argparse.ArgumentParser:
    """Return a parser with the options of the job, followed by those of Kubernetes."""
    made = Parser(
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
    group.add_argument("--max_restart", type=int, default=0, metavar="N", help="how often a failed pod is replaced")
    group.add_argument("--max_job_restart", type=int, default=0, metavar="N", help="with --format jobset: of all pods")
    group.add_argument("--durability", choices=("none", "log"), default="none", help="log: each server has a volume")
    group.add_argument("--log_size", metavar="SIZE", help="of such a volume, as Kubernetes writes it (default: 10Gi)")
    group.add_argument("--storage_class", metavar="NAME", help="of such a volume (default: the cluster's)")
    group.add_argument(
        "--fsync_ms",
        type=float,
        metavar="MS",
        help="as for fleetrun: a power loss may lose the changes of this many milliseconds",
    )
    group.add_argument(
        "--shared_logs",
        action="store_true",
        help="with --replicas 2: one volume for both logs of a server, of a class that several nodes can mount",
    )
    group.add_argument("--replicas", type=int, choices=(1, 2), default=1, help="2: every server has a backup")
    group.add_argument("--coordinator", metavar="URL", help="with --replicas 2: etcd://host:port/NAME")
    group.add_argument(
        "--no_wait_for_backups",
        action="store_true",
        help="with --replicas 2: workers begin before the backups are there",
    )
    group.add_argument("--save_on_stop", metavar="DIR", help="worker 0 saves there when its pod is asked to end")
    group.add_argument(
        "--grace",
        type=int,
        metavar="SECONDS",
        help="seconds that worker 0 has to save when its pod is asked to end (default: 60 with --save_on_stop)",
    )
    group.add_argument("--ttl", type=int, metavar="SECONDS", help="finished Jobs are kept so long (default: a day)")
    group.add_argument(
        "--clean_pod_policy",
        choices=CLEANING,
        help="instead of --ttl, as in a PaddleJob: whether finished Jobs are removed at once, by how they ended",
    )
    group.add_argument(
        "--keep_objects",
        action="store_true",
        help="write no pod with rights that has Secret, ConfigMap, Service and others removed with the Jobs",
    )


def add_pod_options(group: argparse._ArgumentGroup) -> None:
    """Add the options about pods that a job and a model server have in common."""
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
    group.add_argument("--service_account", metavar="NAME", help="of all roles; its token is not mounted")
    group.add_argument("--priority_class", metavar="NAME", help="of all pods (default: the cluster's)")
    group.add_argument("--user", type=int, default=10_001, metavar="UID", help="of all processes (default: 10001)")


def _add_pods(group: argparse._ArgumentGroup) -> None:
    add_pod_options(group)
    group.add_argument(
        "--spread",
        choices=("prefer", "require"),
        default="prefer",
        help="servers over nodes, backups away from their primaries: as far as possible, or else pods wait",
    )
    add_script_option(group)
    group.add_argument("--insecure", action="store_true", help="ranks, or workers of hybrid mode, talk without keys")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", help="of the job and all its objects (default: that of the script)")
    group.add_argument("--namespace", metavar="NAME", help="(default: that of the user who applies the manifests)")
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
    check(options)
    resources = job_resources(options)
    if resources["worker"].gpus is not None and resources["worker"].gpus != int(resources["worker"].gpus):
        raise RoleError(f"--gpus: Kubernetes gives whole GPUs, found {resources['worker'].gpus:g}")
    is_collective = options.nproc_per_node is not None or options.nnodes is not None
    counts: dict[str, Any] = _ranks(options) if is_collective else _counts(options)
    run = secrets.token_hex(4)
    return K8sJob(
        name=check_name(options.name if options.name is not None else name_of(options.script), "--name"),
        image=options.image,
        command=_command(options),
        **counts,
        namespace=check_name(options.namespace, "--namespace", 63) if options.namespace is not None else None,
        server=resources["server"],
        worker=resources["worker"],
        **pod_settings(options, (*RESERVED, *EXPORTS)),
        is_spread_required=options.spread == "require",
        max_restart=options.max_restart,
        max_job_restart=options.max_job_restart,
        log_size=quantity("--log_size", options.log_size or "10Gi") if options.durability == "log" else None,
        storage_class=object_or_none("--storage_class", options.storage_class),
        has_shared_logs=options.shared_logs,
        fsync_ms=options.fsync_ms,
        run=run,
        coordinator=f"{options.coordinator}-{run}" if options.replicas == 2 else None,
        waits_for_backups=not options.no_wait_for_backups,
        is_jobset=options.format == "jobset",
        grace=options.grace or (60 if options.save_on_stop else 0),
        save_on_stop=options.save_on_stop,
        **_cleaning(options),
        has_owner=not options.keep_objects,
        metrics_port=metrics_port_of(options.metrics_port, options.metrics_host, counts.get("ranks_per_node", 1)),
        has_json_logs=options.log_format == "json",
        servers_run_script=options.servers_run_script,
        insecure=options.insecure,
    )


def pod_settings(options: argparse.Namespace, reserved: Sequence[str] = RESERVED) -> dict[str, Any]:
    """Return the values of the options of add_pod_options, by field of the job. `reserved`: variables that --env may
    not set. Raises RoleError."""
    return {
        "claims": claims(options.pvc),
        "environment": variables(options.env, reserved),
        "env_secrets": tuple(object_name("--env_secret", text) for text in options.env_secret),
        "pull_secrets": tuple(object_name("--image_pull_secret", text) for text in options.image_pull_secret),
        "node_selector": pairs("--node_selector", options.node_selector),
        "tolerations": tuple(toleration(text) for text in options.toleration),
        "service_account": object_or_none("--service_account", options.service_account),
        "priority_class": object_or_none("--priority_class", options.priority_class),
        "user": options.user,
    }


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    if options.module:
        return ("-m", options.script, *options.arguments)
    script = options.script if options.in_image else f"{SCRIPT}/{Path(options.script).name}"
    return (script, *options.arguments)


def object_or_none(option: str, text: str | None) -> str | None:
    return None if text is None else object_name(option, text)


def _cleaning(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that decide when finished Jobs are removed. A Job's TTL does not depend on how the Job ended,
    so a pod carries out OnCompletion and OnFailure.
    """
    policy, least = options.clean_pod_policy, 0 if options.keep_objects else _LEAST_TTL
    if policy is None and options.ttl is not None and options.ttl < least:
        raise RoleError(
            f"--ttl {options.ttl}: expected at least {least} seconds, in which a pod makes the Jobs the owners of the "
            "Secret, the ConfigMap and the others, which would stay otherwise. With --keep_objects any number will do"
        )
    if policy is None:
        return {"ttl": _DAY if options.ttl is None else options.ttl}
    if options.ttl is not None:
        raise RoleError(
            f"--clean_pod_policy {policy} and --ttl {options.ttl} say the same thing twice: use one of them"
        )
    excluded = {"--keep_objects": options.keep_objects, "--format jobset": options.format == "jobset"}
    other = next((name for name, is_given in excluded.items() if is_given), None)
    if policy in _CLEANS_ON and other:
        raise RoleError(
            f"--clean_pod_policy {policy} is done by a pod beside Jobs, which {other} does without: leave one of them "
            "out, or give --ttl SECONDS"
        )
    return {"ttl": least if policy == "Always" else None, "cleans_on": _CLEANS_ON.get(policy)}


def _counts(options: argparse.Namespace) -> dict[str, int]:
    least, most = options.worker_num if isinstance(options.worker_num, tuple) else (0, options.worker_num)
    counts = {"--server_num": options.server_num, "--worker_num": most}
    found = {option: 1 if number is None else number for option, number in counts.items()}
    for option, number in found.items():
        if not isinstance(number, int) or not 1 <= number <= _MOST:
            raise RoleError(f"{option}: expected a number of pods from 1 to {_MOST:,}, found {number}")
    return {"num_servers": found["--server_num"], "num_workers": found["--worker_num"], "min_workers": least}


def _ranks(options: argparse.Namespace) -> dict[str, int]:
    gpus = options.worker_gpus
    ranks = options.nproc_per_node if options.nproc_per_node is not None else int(gpus or 1)
    nodes = 1 if options.nnodes is None else options.nnodes
    for option, number in (("--nproc_per_node", ranks), ("--nnodes", nodes)):
        if not 1 <= number <= _MOST:
            raise RoleError(f"{option}: expected a number from 1 to {_MOST:,}, found {number}")
    if not options.insecure:
        counts = ("nproc_per_node", "nnodes")
        given = ", ".join(f"--{name}" for name in counts if getattr(options, name) is not None)
        raise RoleError(
            f"{given}: ranks of several pods meet by torch.distributed, which neither encrypts nor authenticates. The "
            "manifests have a NetworkPolicy that lets only pods of this job in; say --insecure if your cluster "
            "enforces it, or if no one else uses its network."
        )
    return {"num_nodes": nodes, "ranks_per_node": ranks}
