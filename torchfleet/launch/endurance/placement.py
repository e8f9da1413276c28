"""Where the backups of servers run, and which coordinator decides which of the two replicas is primary."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from torchfleet.base.errors import RoleError
from torchfleet.base.own_folders import own_folder
from torchfleet.base.role.process_settings import WAIT_FOR_BACKUPS
from torchfleet.launch.surroundings import surroundings
from torchfleet.ps.coordination.coordinators import VARIABLE, make_coordinator
from torchfleet.ps.net.replica_channels import SEPARATOR

REPLICAS = "FLEET_REPLICAS"
_MOST_PORTS = 1 << 16


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=int,
        choices=(1, 2),
        help="2: every server has a backup, which takes its place when it is lost (default: FLEET_REPLICAS, else 1)",
    )
    group.add_argument(
        "--coordinator",
        metavar="URL",
        help="where it is decided which of two replicas is primary: etcd://host:port/NAME, NAME being that of this run "
        "(default: FLEET_COORDINATOR, else fleetrun itself, on one machine)",
    )

    group.add_argument(
        "--no_wait_for_backups",
        action="store_true",
        help="with --replicas 2: workers begin before every server has its backup. A server that is lost until then "
        "takes its rows with it (default: FLEET_WAIT_FOR_BACKUPS, else they wait)",
    )


def waiting_variables(no_wait: bool, replicas: int) -> dict[str, str]:
    """Return the variable that tells servers and workers not to wait for backups, if the user said so. Raises
    RoleError."""
    refuse_waiting(no_wait, replicas)
    return {WAIT_FOR_BACKUPS: "0"} if no_wait else {}


def refuse_waiting(no_wait: bool, replicas: int) -> None:
    """Raise RoleError if the user says not to wait for backups in a job without backups."""
    if no_wait and replicas == 1:
        raise RoleError("--no_wait_for_backups is about backups of servers, and there are none: add --replicas 2")


def num_replicas(given: int | None, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of replicas from the option, or else from FLEET_REPLICAS. Raises RoleError."""
    text = environment.get(REPLICAS) or "1"
    if given is None and text not in ("1", "2"):
        raise RoleError(f"{REPLICAS} must be 1, or 2 for servers with a backup each; found {text!r}")
    return int(text) if given is None else given


def with_backups(servers: Sequence[str]) -> list[str]:
    """Return both addresses of every server. A backup is on the next host of the list, at a port above all ports of
    servers; on the same host if the list has only one host. Raises RoleError if there is no such port."""
    places = [(host, int(port)) for host, _, port in (place.rpartition(":") for place in servers)]
    hosts = list(dict.fromkeys(host for host, _ in places))
    ports = [port for _, port in places]
    behind = max(ports) - min(ports) + 1
    if max(ports) + behind >= _MOST_PORTS:
        raise RoleError(
            f"--replicas 2 puts backups on ports {min(ports) + behind} to {max(ports) + behind}, behind those of "
            f"--servers, and ports end at {_MOST_PORTS - 1}: give --servers lower ports"
        )
    following = {host: hosts[(i + 1) % len(hosts)] for i, host in enumerate(hosts)}
    backups = [f"{following[host]}:{port + behind}" for host, port in places]
    return [f"{place}{SEPARATOR}{backup}" for place, backup in zip(servers, backups, strict=True)]


def coordinator_url(given: str | None, replicas: int, is_all_here: bool) -> str | None:
    """Return the URL given by the user. None: fleetrun provides the coordinator, or there are no backups. Raises
    RoleError if the URL is invalid or missing.
    """
    url = given or surroundings().get(VARIABLE) or None
    if replicas == 1:
        if given:
            raise RoleError("--coordinator decides between replicas of servers, and there are none: add --replicas 2")
        return None
    if url is not None:
        make_coordinator(url)  # raises if the URL is invalid
    elif not is_all_here:
        raise RoleError(
            "--replicas 2 on several machines needs a third party that decides which replica is primary: give "
            "--coordinator etcd://host:port/NAME, the same on all machines"
        )
    return url


def described_coordination(url: str | None, replicas: int) -> dict[str, str]:
    """Return what `coordination` yields, for --dry_run."""
    return {} if replicas == 1 else {VARIABLE: url or "(a folder of this run)"}


@contextlib.contextmanager
def coordination(url: str | None, replicas: int, attempt: int) -> Iterator[dict[str, str]]:
    """Yield the variables that tell servers the coordinator. fleetrun's own is a folder, which is removed at the end.

    Every attempt to run the job starts without a primary.
    """
    if replicas == 1:
        yield {}
    elif url is not None:
        yield {VARIABLE: f"{url}/{attempt}" if attempt else url}
    else:
        with own_folder("terms") as folder:
            yield {VARIABLE: f"file://{folder}"}
