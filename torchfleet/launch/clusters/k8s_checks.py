"""Checks of the options of `fleetrun k8s`, before anything is written."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.endurance.placement import refuse_waiting
from torchfleet.ps.coordination.coordinators import make_coordinator


def check(options: argparse.Namespace) -> None:
    """Raise RoleError for values out of bounds and for options that exclude each other."""
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
    if options.shared_logs and not (is_logged and options.replicas == 2):
        raise RoleError(
            "--shared_logs is about the logs of servers and of their backups: add --durability log and --replicas 2"
        )
    refuse_waiting(options.no_wait_for_backups, options.replicas)
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
    both += ["servers_run_script"] if options.servers_run_script else []
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
