"""The options that describe a job on any launcher, and the JobSpec made from them."""

from __future__ import annotations

import argparse
import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.log_file import DEFAULT_BYTES
from torchfleet.base.pages import page
from torchfleet.launch.job_spec import JobSpec, Resources
from torchfleet.launch.processes import module_command, script_command
from torchfleet.observe.watch.watchers import watching_of
from torchfleet.ps.tables.settings.table_size import parse_bytes

RESOURCES = ("server_cpus", "server_memory", "worker_cpus", "worker_memory", "worker_gpus")


def add_counts(parser: argparse.ArgumentParser) -> None:
    """Add the options for the numbers of servers and workers."""
    parser.add_argument(
        "--server_num",
        type=_count_or_auto,
        metavar="N|auto",
        help="servers (default: 1); auto: one for each core of this machine that the workers leave",
    )
    parser.add_argument(
        "--worker_num",
        type=_count_or_range,
        metavar="N|MIN:MAX",
        help="workers (default: 1); MIN:MAX: they come and go with the free cores of this machine or of Ray",
    )


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add the options for the resources of a process of each role."""
    group = parser.add_argument_group("resources of one process, on a cluster")
    for role in ("server", "worker"):
        group.add_argument(f"--{role}_cpus", type=float, metavar="N", help=f"cores of a {role} (default: 1)")
        group.add_argument(f"--{role}_memory", metavar="SIZE", help=f"memory of a {role}, such as 8GB")
    group.add_argument("--worker_gpus", type=float, metavar="N", help="GPUs of a worker, or of a rank (default: none)")


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script and its arguments. They must be the last arguments added to the parser."""
    parser.add_argument(
        "-m", "--module", action="store_true", help="what follows is a module, to be run as `python -m` would"
    )
    parser.add_argument("script", nargs="?", help="the training script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def check_script(options: argparse.Namespace) -> None:
    """Raise RoleError unless a script, or with -m a module, was given."""
    if options.script is None:
        raise RoleError("no script given. Usage: fleetrun --server_num 2 --worker_num 2 train.py [its options]")
    if options.module:
        _check_module(options.script)
    elif not Path(options.script).is_file():
        raise RoleError(f"no script at {options.script}")


def refuse_heter_workers(options: argparse.Namespace) -> None:
    """Raise RoleError for heter workers on a cluster, whose launchers do not start them."""
    if options.heter_worker_num or options.heter_workers:
        raise RoleError(
            "--heter_worker_num, --heter_workers: fleetrun starts heter workers on this machine (--server_num) or on "
            "listed ones (--servers), not on a cluster. There, give each process its role by FLEET_ROLE=HETER_WORKER "
            f"and other variables: {page('heter')}."
        )


def job_spec_of(options: argparse.Namespace) -> JobSpec:
    """Return the job that these options describe. Raises FleetError for invalid sizes and resources."""
    command = module_command if options.module else script_command
    is_elastic = isinstance(options.worker_num, tuple)
    least, most = options.worker_num if is_elastic else (None, options.worker_num)
    size = getattr(options, "log_max_bytes", None)  # fleetrun slurm has no such option, but its tasks have it
    return JobSpec(
        command=tuple(command(options.script, options.arguments)),
        log_dir=Path(options.log_dir),
        num_servers=options.server_num,
        num_workers=most,
        min_workers=least,
        resources=job_resources(options),
        folder=Path.cwd() if options.module else Path(options.script).absolute().parent,
        max_restart=options.max_restart,
        max_job_restart=options.max_job_restart,
        key_dir=options.key_dir,
        insecure=options.insecure,
        trace_every=getattr(options, "trace_every", None) or 0,
        max_log_bytes=DEFAULT_BYTES if size is None else parse_bytes(size, "--log_max_bytes"),
        watching=watching_of(options),
    )


def job_resources(options: argparse.Namespace) -> dict[str, Resources]:
    """Return the resources that a process of each role requests. Raises RoleError for invalid values."""
    for name in RESOURCES:
        value = getattr(options, name)
        if isinstance(value, float) and not (0 < value < math.inf):
            raise RoleError(f"--{name} must be a number above 0, found {value:g}")
    memory = {
        role: parse_bytes(text, f"--{role}_memory") if text is not None else None
        for role, text in (("server", options.server_memory), ("worker", options.worker_memory))
    }
    worker = Resources(options.worker_cpus, memory["worker"], options.worker_gpus)
    return {"server": Resources(options.server_cpus, memory["server"]), "worker": worker, "rank": worker}


def _count_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or auto; found {text!r}") from None


def _count_or_range(text: str) -> int | tuple[int, int]:
    least, colon, most = text.partition(":")
    try:
        found = (int(least), int(most)) if colon else int(least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or MIN:MAX; found {text!r}") from None
    if isinstance(found, tuple) and not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"expected MIN:MAX with 1 <= MIN <= MAX; found {text!r}")
    return found


def _check_module(name: str) -> None:
    """Raise RoleError unless `python -m`, run from here, would find the package of this module."""
    package = name.partition(".")[0]
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        is_found = package.isidentifier() and find_spec(package) is not None
    finally:
        sys.path[:] = path
    if not is_found:
        hint = f"; for a script leave -m out: fleetrun {name}" if Path(name).is_file() else ""
        raise RoleError(f"-m {name}: no module or package '{package}' is installed or in {os.getcwd()}{hint}")
