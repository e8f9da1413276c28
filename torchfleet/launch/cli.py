"""The command line of fleetrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torchfleet import __version__
from torchfleet.errors import FleetError, RoleError
from torchfleet.guard.printable import say
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.launchers import LAUNCHERS, launcher_of
from torchfleet.launch.processes import module_command, script_command
from torchfleet.net.keys import KeyFolder, keygen

_NOT_YET = ("heter_worker_num", "cluster")

_EXAMPLES = """examples:
  fleetrun --server_num 2 --worker_num 2 train.py --epochs 3        all on this machine
  fleetrun --server_num auto --worker_num 8 train.py                as many servers as there are cores to spare
  fleetrun --keygen keys                                            keys for machines that others can reach
  fleetrun --servers a:7000,b:7000 --workers c:0,d:0 --key_dir keys train.py   the same line on machines a, b, c and d
  fleetrun --nproc_per_node 2 train.py                              a collective job: two ranks on this machine
  fleetrun --gpus 0,1 --ips a,b --insecure train.py                 the same line on machines a and b, two GPUs each
  fleetrun --server_num 2 --worker_num 2 -m package.train --epochs 3   a module, as `python -m` runs it
  fleetrun --dry_run --server_num 1 --worker_num 2 train.py         what would be started, with which environment

The script is the same for all roles: fleet.init() finds out which one a process has. Options of fleetrun stand before
the script, options of the script behind it."""


def parser() -> argparse.ArgumentParser:
    """The options that all launchers share, and those of every launcher."""
    made = argparse.ArgumentParser(
        prog="fleetrun",
        description="Start the processes of a training job, watch them, and end them together.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a script's own --work is not our --worker_num
    )
    made.add_argument(
        "--server_num",
        type=_count_or_auto,
        metavar="N|auto",
        help="servers on this machine (default: 1); auto: one for each core that the workers leave",
    )
    made.add_argument("--worker_num", type=int, help="workers on this machine (default: 1)")
    for launcher in LAUNCHERS.values():
        launcher.add_options(made)
    made.add_argument(
        "--log_dir",
        default="log",
        help="every run has a folder of logs there, and `latest` leads to the newest (default: log)",
    )
    made.add_argument(
        "--max_restart",
        type=int,
        default=0,
        help="start a failed worker again so often (async, half_async, geo); in hybrid mode, and in a collective job, "
        "all of them together",
    )
    made.add_argument(
        "--max_job_restart",
        type=int,
        default=0,
        help="start the whole job again so often when a process of it fails; the script goes on from what it saved",
    )
    made.add_argument(
        "--key_dir", default=os.environ.get("FLEET_KEY_DIR"), help="folder of keys (default: FLEET_KEY_DIR)"
    )
    made.add_argument("--insecure", action="store_true", help="talk to other machines without keys")
    made.add_argument("--dry_run", action="store_true", help="print what would be started, and start nothing")
    made.add_argument("--keygen", metavar="DIR", help="make a set of keys in DIR, and do nothing else")
    for name in _NOT_YET:
        made.add_argument(f"--{name}", help=argparse.SUPPRESS)
    made.add_argument("--version", action="version", version=f"fleetrun {__version__}")
    made.add_argument(
        "-m", "--module", action="store_true", help="what follows is a module, to be run as `python -m` would"
    )
    made.add_argument("script", nargs="?", help="the training script, or with -m the module")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return made


def _count_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or auto; found {text!r}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run fleetrun with these arguments (default: those of the process) and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except FleetError as error:
        say(f"fleetrun: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.keygen:
        for path in keygen(options.keygen):
            print(path)
        return 0
    launcher = launcher_of(options)
    _check(options)
    job = _job_spec(options)
    if options.dry_run:
        print("\n".join(launcher.describe(job, options)))
        return 0
    return launcher.run(job, options)


def _job_spec(options: argparse.Namespace) -> JobSpec:
    command = module_command if options.module else script_command
    return JobSpec(
        command=tuple(command(options.script, options.arguments)),
        log_dir=Path(options.log_dir),
        num_servers=options.server_num,
        num_workers=options.worker_num,
        max_restart=options.max_restart,
        max_job_restart=options.max_job_restart,
        key_dir=options.key_dir,
        insecure=options.insecure,
    )


def _check(options: argparse.Namespace) -> None:
    for name in _NOT_YET:
        if getattr(options, name) is not None:
            raise RoleError(
                f"--{name} is not available yet; start jobs with --server_num and --worker_num, or --nproc_per_node"
            )
    if options.script is None:
        raise RoleError("no script given. Usage: fleetrun --server_num 2 --worker_num 2 train.py [its options]")
    if options.module:
        _check_module(options.script)
    elif not Path(options.script).is_file():
        raise RoleError(f"no script at {options.script}")
    for name in ("max_restart", "max_job_restart"):
        if getattr(options, name) < 0:
            raise RoleError(f"--{name} must be at least 0, found {getattr(options, name)}")
    if options.max_restart and options.max_job_restart:
        raise RoleError("--max_restart starts one worker again, --max_job_restart all processes: use one of them")
    if options.key_dir:
        KeyFolder(options.key_dir)  # raises before anything starts if there is no such folder


def _check_module(name: str) -> None:
    """Raise RoleError unless the package that the module is in can be found, from here as `python -m` looks for it."""
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
