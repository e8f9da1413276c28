"""The processes of a job with servers: their addresses, which of them this machine starts, and their environments."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.errors import RoleError, SecurityError
from torchfleet.base.ownership import check_own
from torchfleet.base.role.role_info import HETER_WORKER
from torchfleet.launch.job_spec import Task
from torchfleet.ps.net.replica_channels import SEPARATOR

PORTS = range(10240, 32000)  # below the ephemeral ports of outgoing connections
_CLAIMED = 120.0  # seconds that a port stays reserved among jobs of this user: its server may still be starting


@dataclass(frozen=True)
class JobLayout:
    """The addresses of all processes of a job with servers, and the indexes of those on this machine."""

    servers: tuple[str, ...]
    workers: tuple[str, ...]
    local_servers: tuple[int, ...]
    local_workers: tuple[int, ...]
    local_backups: tuple[int, ...] = ()  # of servers with replicas, which have joined addresses: "a:1|b:1"
    heters: tuple[str, ...] = ()
    local_heters: tuple[int, ...] = ()

    @property
    def places(self) -> list[str]:
        """The addresses of all servers and backups."""
        return [place for server in self.servers for place in server.split(SEPARATOR)]

    @property
    def listening(self) -> list[str]:
        """The addresses at which processes of this job listen: servers, backups and heter workers."""
        return [*self.places, *self.heters]

    @property
    def is_all_here(self) -> bool:
        """Whether this launcher starts every process."""
        num_here = len(self.local_servers) + len(self.local_backups) + len(self.local_heters)
        return num_here == len(self.listening) and len(self.local_workers) == len(self.workers)


def one_machine(num_servers: int, num_workers: int, replicas: int = 1, num_heters: int = 0) -> JobLayout:
    """Return the layout with all processes on this machine; servers and heter workers listen on free loopback ports."""
    found = [f"127.0.0.1:{port}" for port in free_ports(num_servers * replicas + num_heters)]
    heters, places = tuple(found[:num_heters]), found[num_heters:]
    servers = tuple(SEPARATOR.join(places[i::num_servers]) for i in range(num_servers))
    workers = ("127.0.0.1:0",) * num_workers
    here = tuple(range(num_servers))
    backups = here if replicas > 1 else ()
    return JobLayout(servers, workers, here, tuple(range(num_workers)), backups, heters, tuple(range(num_heters)))


def several_machines(servers: Sequence[str], workers: Sequence[str], heters: Sequence[str] = ()) -> JobLayout:
    """Return the layout of a job on several machines, which all get the same lists. A process is local if its host is a
    name or an address of this machine.

    Raises RoleError if no process is local.
    """
    own = own_addresses()
    replicas = [place.split(SEPARATOR) for place in servers]
    local_servers = tuple(i for i, places in enumerate(replicas) if is_here(places[0], own))
    local_backups = tuple(i for i, places in enumerate(replicas) if any(is_here(place, own) for place in places[1:]))
    local_workers = tuple(i for i, place in enumerate(workers) if is_here(place, own))
    local_heters = tuple(i for i, place in enumerate(heters) if is_here(place, own))
    if not (local_servers or local_workers or local_backups or local_heters):
        listed = (*workers, *heters, *(place for places in replicas for place in places))
        hosts = ", ".join(sorted({place.rpartition(":")[0] for place in listed}))
        raise RoleError(
            f"none of the hosts {hosts} is this machine ({', '.join(sorted(own))}). Name it in --servers or --workers "
            "by one of these, or set POD_IP to the name it has in the lists."
        )
    return JobLayout(
        tuple(servers), tuple(workers), local_servers, local_workers, local_backups, tuple(heters), local_heters
    )


def tasks(layout: JobLayout, num_workers: int, base: dict[str, str], num_kept: int = 0) -> list[Task]:
    """Return the processes to start on this machine: servers, workers, heter workers. `base` is part of the environment
    of each.

    Unless OMP_NUM_THREADS is set, the workers and heter workers of the machine share its cores, except `num_kept` of
    them.
    """
    common = {
        **base,
        "FLEET_SERVER_ENDPOINTS": ",".join(layout.servers),
        "FLEET_NUM_WORKERS": str(num_workers),
        "PYTHONUNBUFFERED": "1",
    }
    common["FLEET_WORKER_ENDPOINTS"] = ",".join(_numbered(layout.workers))
    if layout.heters:
        common["FLEET_HETER_ENDPOINTS"] = ",".join(layout.heters)
    num_computing = len(layout.local_workers) + len(layout.local_heters)
    threads = os.environ.get("OMP_NUM_THREADS") or str(worker_threads(usable_cores(), num_computing, num_kept))
    server = {**common, "FLEET_ROLE": "SERVER", "OMP_NUM_THREADS": "1"}
    started = [Task("server", i, {**server, "FLEET_SERVER_INDEX": str(i)}) for i in layout.local_servers]
    started += [
        Task("server", i, {**server, "FLEET_SERVER_INDEX": str(i), "FLEET_REPLICA": "1"}, replica=1)
        for i in layout.local_backups
    ]
    started += [
        Task("worker", i, {**common, "FLEET_ROLE": "WORKER", "FLEET_WORKER_INDEX": str(i), "OMP_NUM_THREADS": threads})
        for i in layout.local_workers
    ]
    heter = {**common, "FLEET_ROLE": "HETER_WORKER", "OMP_NUM_THREADS": threads}
    return started + [Task(HETER_WORKER, i, {**heter, "FLEET_HETER_INDEX": str(i)}) for i in layout.local_heters]


def given_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the threads of a worker if the user set OMP_NUM_THREADS. Raises RoleError if it is not a number."""
    text = environment.get("OMP_NUM_THREADS")
    if not text:
        return None
    first = text.split(",")[0]  # one number for each level of nested parallelism
    if not (first.isascii() and first.isdigit() and int(first) > 0):
        raise RoleError(f"OMP_NUM_THREADS must be a number above 0, found {text!r}")
    return int(first)


def spare_servers(num_cores: int, num_workers: int, num_threads: int | None) -> tuple[int, str]:
    """Return the number of servers that `--server_num auto` starts with `num_workers` workers here, and the reason.

    One server for each core that the workers leave free, at least one. More servers than workers do not help: each
    request of a worker is one message to every server.
    """
    threads = num_threads or 1
    num_left = num_cores - num_workers * threads
    num_servers = max(1, min(num_left, num_workers))
    left = f"{_num(num_workers, 'worker')} of {_num(threads, 'thread')} leave {max(0, num_left)} of {num_cores} cores"
    if num_left < 1:
        why = f"{left}, and a job needs a server"
    elif num_left > num_workers:
        why = f"{left}, and more servers than workers do not help"
    else:
        why = f"{left}, and a server uses one"
    return num_servers, f"--server_num auto: {_num(num_servers, 'server')}. {why}."


def worker_threads(num_cores: int, num_workers: int, num_servers: int) -> int:
    """Return the threads of each worker of this machine if `num_servers` cores are kept for servers."""
    return max(1, (num_cores - num_servers) // max(1, num_workers))


def _num(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def free_ports(num: int, begin: int | None = None, host: str = "127.0.0.1") -> list[int]:
    """Return `num` different free ports: the first free ones of PORTS, starting at index `begin` or at a random one.

    Ephemeral ports are not used: the system could give them to outgoing connections before a server listens, or while
    it restarts. Without `begin`, ports that this function gave to this user's processes in the last _CLAIMED seconds
    are not used either: their servers may not listen yet. Raises RoleError if there are too few.
    """
    is_random = begin is None
    begin = random.SystemRandom().randrange(len(PORTS)) if begin is None else begin
    found: list[int] = []
    for number in range(len(PORTS)):
        port = PORTS[(begin + number) % len(PORTS)]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            if not is_random or _claim(port):
                found.append(port)
        if len(found) == num:
            return found
    raise RoleError(
        f"expected {num} free ports of {PORTS.start} to {PORTS.stop - 1} on this machine, found {len(found)}"
    )


def _claim(port: int) -> bool:
    """Claim the port for _CLAIMED seconds. Returns False if a process of this user has claimed it already."""
    claim = Path(tempfile.gettempdir()) / f"torchfleet-ports-{os.getuid()}" / str(port)
    with contextlib.suppress(OSError, SecurityError):  # if claims cannot be written, any free port is used
        claim.parent.mkdir(mode=0o700, exist_ok=True)
        check_own(claim.parent)
        _forget_claims(claim.parent)
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _forget_claims(folder: Path) -> None:
    for claim in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may be doing the same
            if time.time() - claim.lstat().st_mtime >= _CLAIMED:
                claim.unlink()


def own_addresses() -> set[str]:
    """Return the names and addresses by which a list of hosts may refer to this machine."""
    own = {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}
    if os.environ.get("POD_IP"):
        own.add(os.environ["POD_IP"])
    for name in list(own):
        try:
            own |= {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
        except OSError:
            continue
    return own


def is_here(place: str, own: set[str]) -> bool:
    """Whether the host of `place`, host:port, is one of `own`, resolves to one, or is an address of loopback."""
    host = _host(place)
    if host in own:
        return True
    try:
        found = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found & own) or any(ipaddress.ip_address(address).is_loopback for address in found)


def is_any_address(place: str) -> bool:
    """Whether the host of `place` stands for all addresses of a machine: 0.0.0.0, [::] or *."""
    host = _host(place)
    try:
        return host == "*" or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _host(place: str) -> str:
    return place.rpartition(":")[0].strip("[]")


def _numbered(workers: Sequence[str]) -> list[str]:
    """Replace port 0 of workers, which need no port, by the first number that makes the endpoint unique."""
    taken = {place for place in workers if not place.endswith(":0")}
    numbered = []
    for place in workers:
        free = (f"{place[:-2]}:{i}" for i in range(1, 1 << 16))
        numbered.append(next(endpoint for endpoint in free if endpoint not in taken) if place.endswith(":0") else place)
        taken.add(numbered[-1])
    return numbered
