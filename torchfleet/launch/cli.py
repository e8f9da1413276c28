"""The command line of fleetrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchfleet.errors import FleetError, RoleError
from torchfleet.launch import rank_plan
from torchfleet.launch.processes import script_command
from torchfleet.launch.roles import Layout, Task, one_machine, several_machines, tasks
from torchfleet.launch.watch import Restarts, Watch
from torchfleet.net.keys import KeyFolder, is_private, keygen

_NOT_YET = ("heter_worker_num", "cluster")

_EXAMPLES = """examples:
  fleetrun --server_num 2 --worker_num 2 train.py --epochs 3        all on this machine
  fleetrun --servers a:7000,b:7000 --workers c:0,d:0 train.py       the same line on machines a, b, c and d
  fleetrun --nproc_per_node 2 train.py                              a collective job: two ranks on this machine
  fleetrun --gpus 0,1 --ips a,b --insecure train.py                 the same line on machines a and b, two GPUs each
  fleetrun --dry_run --server_num 1 --worker_num 2 train.py         what would be started, with which environment
  fleetrun --keygen keys                                            keys for machines that others can reach

The script is the same for all roles: fleet.init() finds out which one a process has. Options of fleetrun stand before
the script, options of the script behind it."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fleetrun",
        description="Start the processes of a training job, watch them, and end them together.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a script's own --work is not our --worker_num
    )
    made.add_argument("--server_num", type=int, help="servers on this machine")
    made.add_argument("--worker_num", type=int, help="workers on this machine")
    made.add_argument("--servers", help="host:port of every server of the job, separated by commas")
    made.add_argument("--workers", help="host:port of every worker (port 0: any); worker 0 is the first")
    _add_collective(made)
    made.add_argument("--log_dir", default="log", help="where serverlog.N and workerlog.N go (default: log)")
    made.add_argument(
        "--max_restart",
        type=int,
        default=0,
        help="start a failed worker again so often (async, geo); of a collective job, all ranks together",
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
    made.add_argument("script", nargs="?", help="the training script")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return made


def _add_collective(made: argparse.ArgumentParser) -> None:
    made.add_argument("--nproc_per_node", type=int, help="ranks of a collective job on this machine")
    made.add_argument("--gpus", help="one rank per named GPU, separated by commas: 0,1")
    made.add_argument("--nnodes", help="machines of a collective job: a number, or MIN:MAX of them, which come and go")
    made.add_argument("--master", help="host:port where these machines meet; the host is machine 0")
    made.add_argument("--rank", type=int, help="the number of this machine")
    made.add_argument("--ips", help="all machines of a collective job, separated by commas; machine 0 is the first")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except FleetError as error:
        print(f"fleetrun: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.keygen:
        for path in keygen(options.keygen):
            print(path)
        return 0
    is_collective = rank_plan.is_asked(options)
    _check(options)
    if is_collective:
        return _run_collective(options)
    for attempt in range(options.max_job_restart + 1):
        watch = _start(options, attempt)
        code = 0 if watch is None else watch.run()
        if watch is None or code != 1 or watch.is_finished:
            break
        if attempt < options.max_job_restart:
            print(f"[fleetrun] starting the job again ({attempt + 1} of {options.max_job_restart})", flush=True)
    return code


def _run_collective(options: argparse.Namespace) -> int:
    plan, command = rank_plan.make_plan(options), script_command(options.script, options.arguments)
    if options.dry_run:
        print("\n".join(rank_plan.describe(plan, command, Path(options.log_dir))))
        return 0
    log_dir = _log_dir(options)
    from torchfleet.launch.elastic import run  # and with it torch, which a launcher of servers does not need

    return run(plan, command, log_dir)


def _check(options: argparse.Namespace) -> None:
    for name in _NOT_YET:
        if getattr(options, name) is not None:
            raise RoleError(
                f"--{name} is not available yet; start jobs with --server_num and --worker_num, or --nproc_per_node"
            )
    if options.script is None:
        raise RoleError("no script given. Usage: fleetrun --server_num 2 --worker_num 2 train.py [its options]")
    if not Path(options.script).is_file():
        raise RoleError(f"no script at {options.script}")
    for name in ("max_restart", "max_job_restart"):
        if getattr(options, name) < 0:
            raise RoleError(f"--{name} must be at least 0, found {getattr(options, name)}")
    if options.max_restart and options.max_job_restart:
        raise RoleError("--max_restart starts one worker again, --max_job_restart all processes: use one of them")
    if options.key_dir:
        KeyFolder(options.key_dir)  # a folder that is not there is named before anything starts


def _start(options: argparse.Namespace, attempt: int) -> Watch | None:
    """The watch over a job that is about to run; None if it was only to be shown."""
    layout, num_workers = _layout(options)
    base = {"FLEET_KEY_DIR": str(Path(options.key_dir).absolute())} if options.key_dir else {}
    if options.insecure:
        base["FLEET_INSECURE"] = "1"
    elif not options.key_dir:
        _refuse_open_servers(layout)
    started = tasks(layout, num_workers, base)
    command = script_command(options.script, options.arguments)
    if options.dry_run:
        _print_plan(started, command, Path(options.log_dir))
        return None
    log_dir = _log_dir(options)
    restarts = Restarts(options.max_restart, attempt, options.max_job_restart)
    return Watch(started, command, log_dir, layout, restarts, options.key_dir)


def _log_dir(options: argparse.Namespace) -> Path:
    log_dir = Path(options.log_dir).absolute()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RoleError(f"cannot make the folder of logs {log_dir}: {error}") from None
    return log_dir


def _layout(options: argparse.Namespace) -> tuple[Layout, int]:
    here = options.server_num is not None or options.worker_num is not None
    there = options.servers is not None or options.workers is not None
    if here and there:
        raise RoleError(
            "--server_num/--worker_num place everything here, --servers/--workers on several machines: use one"
        )
    if there:
        if not options.servers or not options.workers:
            raise RoleError("a job on several machines needs both lists, --servers and --workers")
        servers, workers = _addresses("--servers", options.servers), _addresses("--workers", options.workers)
        return several_machines(servers, workers), len(workers)
    num_servers = 1 if options.server_num is None else options.server_num
    num_workers = 1 if options.worker_num is None else options.worker_num
    if num_servers < 1 or num_workers < 1:
        raise RoleError(f"--server_num and --worker_num must be at least 1, found {num_servers} and {num_workers}")
    return one_machine(num_servers, num_workers), num_workers


def _addresses(option: str, text: str) -> list[str]:
    places = [place.strip() for place in text.split(",") if place.strip()]
    for place in places:
        host, _, port = place.rpartition(":")
        least = 1 if option == "--servers" else 0  # a worker needs no port, a server one that workers know
        if not (host and port.isascii() and port.isdigit() and least <= int(port) < 1 << 16):
            raise RoleError(f"{option} expects host:port, separated by commas; found {place!r}")
    if not places:
        raise RoleError(f"{option} lists no address, found {text!r}")
    if option == "--servers" and len(set(places)) != len(places):
        raise RoleError(f"{option}: an address appears twice in {text!r}")
    return places


def _refuse_open_servers(layout: Layout) -> None:
    for i in layout.local_servers:
        if not is_private(f"tcp://{layout.servers[i]}"):
            raise RoleError(
                f"server {i} at {layout.servers[i]} can be reached from other machines, and there are no keys. Make "
                "them with `fleetrun --keygen DIR`, copy DIR to every machine and give --key_dir DIR; or say "
                "--insecure."
            )


def _print_plan(started: Sequence[Task], command: Sequence[str], log_dir: Path) -> None:
    for task in started:
        print(f"{task.name}: {' '.join(command)}   (log: {log_dir / task.log_name})")
        for name, value in task.environment.items():
            print(f"    {name}={value}")
