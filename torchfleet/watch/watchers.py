"""What watches a job. The launcher looks at its processes once, and hands the same snapshot to all watchers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchfleet.monitor.snapshot import JobSnapshot

ANY_PORT = -1  # of the dashboard: its default port, or the next that is free


class Watcher(Protocol):
    """One way to show or record a job. All calls come from the launcher's loop, and none may wait for long."""

    def look(self, snapshot: JobSnapshot) -> None:
        """The job as it is now; several times a second."""

    def note(self, line: str, is_event: bool) -> None:
        """A line for the user. `is_event`: the launcher says it; else it is output of a process."""

    def end(self, snapshot: JobSnapshot) -> None:
        """The job has finished, and this is the last of it. Not called for a job that failed or was stopped."""

    def close(self) -> None:
        """Nothing more will come, however the job ended."""


@dataclass(frozen=True)
class Watching:
    """How the user wants to watch the job, from the options of the command line."""

    verbose: bool = False  # show every table of every server
    dashboard: int | None = None  # the port of the web page; None: there is none


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options about watching, which all launchers share."""
    group = parser.add_argument_group("watching")
    group.add_argument("--verbose", action="store_true", help="show every table of every server")
    group.add_argument(
        "--dashboard",
        metavar="PORT",
        nargs="?",
        type=_port,
        const=ANY_PORT,
        help="serve a web page of the job on this machine while it runs (default: port 8470, or the next that is free)",
    )


def watching_of(options: argparse.Namespace) -> Watching:
    """Raises FleetError for what makes no sense."""
    # fleetrun slurm leaves them to the tasks
    return Watching(verbose=getattr(options, "verbose", False), dashboard=getattr(options, "dashboard", None))


class _NoPort(str):
    """Stands behind a --dashboard that has no port: argparse would take the script for it."""

    __slots__ = ()


def parse_with_ports(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """As `parser.parse_args`, with `--dashboard train.py` understood as --dashboard without a port, and a script."""
    options = parser.parse_args(list(_with_ports(arguments)))
    options.arguments = [argument for argument in options.arguments if not isinstance(argument, _NoPort)]
    return options


def _with_ports(arguments: Sequence[str]) -> Iterator[str]:
    for index, argument in enumerate(arguments):
        yield argument
        following = arguments[index + 1 : index + 2]
        if argument == "--dashboard" and not (following and following[0].isdecimal()):
            yield _NoPort(ANY_PORT)


def _port(text: str) -> int:
    if isinstance(text, _NoPort):
        return ANY_PORT
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, found {text!r}")
    return int(text)
