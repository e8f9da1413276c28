"""The watchers of a job. The launcher reads its processes once and passes the same snapshot to all watchers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchfleet.base.errors import RoleError
from torchfleet.base.extras import check_installed
from torchfleet.base.monitor.json_lines import FORMATS, log_format
from torchfleet.base.monitor.prometheus.metrics_port import HOST, LOOPBACK, PORT, port_of
from torchfleet.base.monitor.snapshot import JobSnapshot

ANY_PORT = -1  # of the dashboard: its default port, or the next that is free


class Watcher(Protocol):
    """One way to show or record a job. The launcher's loop makes all calls, and no call may block for long."""

    def look(self, snapshot: JobSnapshot) -> None:
        """Take the current state of the job. Called several times a second."""

    def note(self, line: str, is_event: bool) -> None:
        """Take a line for the user. `is_event`: it comes from the launcher; otherwise it is output of a process."""

    def end(self, snapshot: JobSnapshot) -> None:
        """Take the last state of a job that has finished. Not called for a job that failed or was stopped."""

    def close(self) -> None:
        """Close the watcher, however the job ended. No call follows."""


@dataclass(frozen=True)
class Watching:
    """How the user wants to watch the job, from the options of the command line."""

    verbose: bool = False  # show every table of every server, and every setting
    dashboard: int | None = None  # the port of the web page; None: no web page
    metrics_port: int | None = None  # of the first process of this machine; the others use the following ports
    metrics_host: str = LOOPBACK  # the address on which they serve
    tensorboard: str | None = None  # the folder of event files
    log_format: str = "text"  # of the logs and of the launcher's own lines: one of json_lines.FORMATS

    @property
    def is_json(self) -> bool:
        return self.log_format == "json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about watching, which all launchers share."""
    group = parser.add_argument_group("watching")
    group.add_argument("--verbose", action="store_true", help="show every table of every server, and every setting")
    group.add_argument(
        "--dashboard",
        metavar="PORT",
        nargs="?",
        type=_port,
        const=ANY_PORT,
        help="serve a web page of the job on this machine while it runs (default: port 8470, or the next that is free)",
    )
    add_exports(group)
    group.add_argument(
        "--tensorboard", metavar="DIR", help="write event files for TensorBoard, in a folder of this run below DIR"
    )


def add_exports(group: argparse._ArgumentGroup) -> None:
    """Add the options about exports to other tools; `fleetrun k8s` and `fleetrun slurm` have them, too."""
    group.add_argument(
        "--metrics_port",
        metavar="PORT",
        default=os.environ.get(PORT) or None,
        help="every process serves metrics for Prometheus: the first at this port, the next at the next (default: "
        f"{PORT})",
    )
    group.add_argument(
        "--metrics_host",
        metavar="HOST",
        default=os.environ.get(HOST) or None,
        help=f"the address on which they serve (default: {HOST}, else {LOOPBACK}, this machine alone)",
    )
    group.add_argument(
        "--log_format",
        choices=FORMATS,
        default=log_format(),
        help="json: every line of the logs, and of fleetrun, is a JSON object (default: FLEET_LOG_FORMAT, else text)",
    )


def watching_of(options: argparse.Namespace) -> Watching:
    """Return the settings from the options. Raises FleetError for invalid options and for a missing package."""
    if options.metrics_host is not None and options.metrics_port is None:
        raise RoleError("--metrics_host says where metrics are served, and there is no port: add --metrics_port PORT")
    tensorboard = getattr(options, "tensorboard", None)  # fleetrun slurm has no such options: its tasks do
    if tensorboard is not None:
        check_installed("tensorboard", "--tensorboard", "tensorboard")
    if options.metrics_port is not None:
        check_installed("prometheus_client", "--metrics_port", "prometheus")
    return Watching(
        verbose=getattr(options, "verbose", False),
        dashboard=getattr(options, "dashboard", None),
        metrics_port=None if options.metrics_port is None else port_of(options.metrics_port, "--metrics_port"),
        metrics_host=options.metrics_host or LOOPBACK,
        tensorboard=tensorboard,
        log_format=options.log_format,
    )


class _NoPort(str):
    """Inserted after a --dashboard without a port: argparse would take the script as the port."""

    __slots__ = ()


def parse_with_ports(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Like `parser.parse_args`, but `--dashboard train.py` is --dashboard without a port, followed by a script."""
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
    return ANY_PORT if isinstance(text, _NoPort) else port_or_any(text)


def port_or_any(text: str) -> int:
    """Parse an option that is a port; 0: any free port. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, found {text!r}")
    return int(text)
