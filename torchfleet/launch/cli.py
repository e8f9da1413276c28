"""The command line of fleetrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from torchfleet import __version__
from torchfleet.base.command_line import Parser
from torchfleet.base.errors import FleetError, RoleError
from torchfleet.base.extras import check_installed
from torchfleet.base.paddle_names import OPTIONS as PADDLE_OPTIONS
from torchfleet.base.printable import say
from torchfleet.base.tracing.otlp import EXPORTER, VARIABLE, trace_every
from torchfleet.launch.clusters.job_options import (
    RESOURCES,
    add_counts,
    add_resources,
    add_script,
    check_script,
    job_spec_of,
)
from torchfleet.launch.launchers import LAUNCHERS, launcher_of
from torchfleet.launch.surroundings import check_surroundings
from torchfleet.launch.taken_options import RANKS, kind_of, refuse_others
from torchfleet.observe.watch.watchers import add_options as add_watching
from torchfleet.observe.watch.watchers import parse_with_ports
from torchfleet.ps.net.keys import KeyFolder, keygen

_COUNTS = ("--server_num", "--worker_num", "--nproc_per_node")
_NO_JOB = ("dry_run", "keygen")  # options with which fleetrun starts no job

# First argument → the function that takes the other arguments and returns the exit status. Imported on first use.
SUBCOMMANDS = {
    "k8s": "torchfleet.launch.clusters.k8s_command:main",
    "slurm": "torchfleet.launch.clusters.slurm_command:main",
}

_EXAMPLES = """examples:
  fleetrun --server_num 2 --worker_num 2 train.py --epochs 3        all on this machine
  fleetrun --server_num auto --worker_num 8 train.py                as many servers as there are cores to spare
  fleetrun --keygen keys                                            keys for machines that others can reach
  fleetrun --servers a:7000,b:7000 --workers c:0,d:0 --key_dir keys train.py   the same line on machines a, b, c and d
  fleetrun --nproc_per_node 2 train.py                              a collective job: two ranks on this machine
  fleetrun --gpus 0,1 --ips a,b --insecure train.py                 the same line on machines a and b, two GPUs each
  fleetrun --server_num 2 --worker_num 2 -m package.train --epochs 3   a module, as `python -m` runs it
  fleetrun --dashboard --server_num 2 --worker_num 2 train.py       with a web page that shows the job
  fleetrun --dry_run --server_num 1 --worker_num 2 train.py         what would be started, with which environment

The script is the same for all roles: fleet.init() finds out which one a process has. Options of fleetrun stand before
the script, options of the script behind it."""


def parser() -> Parser:
    """Return a parser with the options that all launchers share and the options of each launcher."""
    made = Parser(
        prog="fleetrun",
        description="Start the processes of a training job, watch them, and end them together.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --work of the script must not be taken for --worker_num
    )
    add_counts(made)
    for launcher in LAUNCHERS.values():
        launcher.add_options(made)
    add_watching(made)
    made.add_argument(
        "--log_dir",
        default="log",
        help="every run has a folder of logs there, and `latest` leads to the newest (default: log)",
    )
    made.add_argument(
        "--max_restart",
        type=int,
        default=0,
        help="how often a failed worker is started again (async, half_async, geo); in hybrid mode, and in a collective "
        "job, all of them together",
    )
    made.add_argument(
        "--max_job_restart",
        type=int,
        default=0,
        help="how often the whole job is started again when a process fails; the script goes on from what it saved",
    )
    made.add_argument(
        "--key_dir", default=os.environ.get("FLEET_KEY_DIR") or None, help="folder of keys (default: FLEET_KEY_DIR)"
    )
    made.add_argument(
        "--trace_every",
        type=int,
        metavar="N",
        help="send spans of one step of N to an OpenTelemetry collector (OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    made.add_argument("--insecure", action="store_true", help="talk to other machines without keys")
    made.add_argument("--dry_run", action="store_true", help="print what would be started, and start nothing")
    made.add_argument("--keygen", metavar="DIR", help="make a set of keys in DIR, and do nothing else")
    for name in PADDLE_OPTIONS:
        made.add_argument(f"--{name}", nargs="?", const="", help=argparse.SUPPRESS)
    made.add_argument("--version", action="version", version=f"fleetrun {__version__}")
    add_resources(made)
    add_script(made)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run fleetrun with these arguments (default: those of the process) and return its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given and given[0] in SUBCOMMANDS:
            return _subcommand(given[0])(given[1:])
        return _run(parse_with_ports(parser(), given))
    except FleetError as error:
        say(f"fleetrun: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `fleetrun --dry_run ... | head`: Python would fail again when it flushes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.keygen is not None:
        _refuse_beside_keygen(options)
        for path in keygen(options.keygen):
            print(path)
        return 0
    launcher = launcher_of(options)
    check(options)
    _tell_of_options_behind(options.arguments)
    job = job_spec_of(options)
    if options.dry_run:
        print("\n".join(launcher.describe(job, options)), flush=True)
        return 0
    return launcher.run(job, options)


def _refuse_beside_keygen(options: argparse.Namespace) -> None:
    others = [option for name, option in parser().said(options).items() if name != "keygen"]
    if others:
        raise RoleError(
            f"--keygen {options.keygen} makes a set of keys, and does nothing else: leave {', '.join(others)} out"
        )


def _tell_of_options_behind(arguments: Sequence[str]) -> None:
    """Warn if an option such as --worker_num stands behind the script: the script gets it, but the user may have meant
    fleetrun.
    """
    for name in _COUNTS:
        if any(argument.partition("=")[0] == name for argument in arguments):
            text = (
                f"{name} stands behind the script, which gets it. For an option of fleetrun, put it before the script."
            )
            say(f"[fleetrun] {text}", file=sys.stderr)


def options_from(caller: str, values: Mapping[str, Any], script: Sequence[str]) -> argparse.Namespace:
    """Return the options of a call from Python, given by name: True sets a switch, a list repeats an option, None and
    False leave it out. Raises RoleError, with `caller` in its message, for unknown options and for options with which
    fleetrun starts no job.
    """
    wrong = [name for name in _NO_JOB if values.get(name)]
    if wrong:
        raise RoleError(f"{caller} runs a job, and {wrong[0]} does not: use fleetrun --{wrong[0]} on the command line")
    flags: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            flags += [f"--{name}"] if each is True else [f"--{name}", str(each)]

    def refuse(message: str) -> NoReturn:
        """Replace argparse's `error`, which would print all options of fleetrun into a notebook and exit."""
        raise RoleError(f"{caller}: {message}. `fleetrun --help` lists the options and what they take.")

    made = parser()
    made.error = refuse  # type: ignore[method-assign]
    return parse_with_ports(made, [*flags, *script])


def _subcommand(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = SUBCOMMANDS[name].partition(":")
    found: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
    return found


def check(options: argparse.Namespace) -> None:
    """Raise RoleError for a command line that its launcher cannot carry out as a whole, and for variables of the
    environment that are invalid or misspelt.
    """
    for name, way in PADDLE_OPTIONS.items():
        if getattr(options, name) is not None:
            raise RoleError(f"fleetrun has no --{name}: {way}")
    asked = [f"--{name}" for name in RESOURCES if getattr(options, name) is not None]
    if asked and options.cluster is None:
        raise RoleError(
            f"{', '.join(asked)}: only jobs on a cluster request resources, and this job runs on this machine. Add "
            "--cluster ray, or leave them out."
        )
    check_surroundings()
    _check_kind(options)
    if isinstance(options.worker_num, tuple) and options.simulate:
        raise RoleError(
            "--worker_num MIN:MAX: workers come and go with the cores of a real machine or cluster. For a "
            "simulation give one number."
        )
    check_script(options)
    for name in ("max_restart", "max_job_restart"):
        if getattr(options, name) < 0:
            raise RoleError(f"--{name} must be at least 0, found {getattr(options, name)}")
    if options.trace_every is not None and not 1 <= options.trace_every < 10**9:
        raise RoleError(f"--trace_every must be a number of steps, at least 1; found {options.trace_every}")
    if options.trace_every or trace_every():
        check_installed(EXPORTER, "--trace_every" if options.trace_every else VARIABLE, "otel")
    if options.max_restart and options.max_job_restart:
        raise RoleError("--max_restart starts one worker again, --max_job_restart all processes: use one of them")
    if options.key_dir:
        KeyFolder(options.key_dir)  # raises before anything starts if there is no such folder


def _check_kind(options: argparse.Namespace) -> None:
    """Raise RoleError for options that this kind of job would ignore."""
    ranks = [f"--{name}" for name in RANKS if getattr(options, name) is not None]
    if options.verbose and ranks:
        raise RoleError(
            f"--verbose shows tables of servers, and settings of their workers; {ranks[0]} starts a collective job, "
            "which has neither: leave --verbose out"
        )
    if options.max_job_restart and ranks:
        num = options.max_job_restart
        raise RoleError(
            f"--max_job_restart {num}: the ranks of a collective job ({ranks[0]}) are started again all together. Say "
            f"--max_restart {num}"
        )
    chosen = launcher_of(options)
    kind = next((kind_of(name, options) for name, launcher in LAUNCHERS.items() if launcher is chosen), None)
    if kind is not None:
        refuse_others(kind, options, parser().said(options))
