"""Which processes a job has, which of them belong to this machine, and with which environment each starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchfleet.errors import RoleError


@dataclass
class Task:
    """One process to start here."""

    role: str  # "server" or "worker"
    index: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def log_name(self) -> str:
        return f"{self.role}log.{self.index}"


@dataclass(frozen=True)
class Layout:
    """Addresses of all roles of a job, and which of them are here."""

    servers: tuple[str, ...]
    workers: tuple[str, ...]
    local_servers: tuple[int, ...]
    local_workers: tuple[int, ...]


def one_machine(num_servers: int, num_workers: int) -> Layout:
    """Everything here, on free loopback ports."""
    servers = tuple(f"127.0.0.1:{port}" for port in free_ports(num_servers))
    return Layout(servers, (), tuple(range(num_servers)), tuple(range(num_workers)))


def several_machines(servers: Sequence[str], workers: Sequence[str]) -> Layout:
    """The same two lists on every machine; here start those whose host is one of this machine's names or addresses."""
    own = own_addresses()
    local_servers = tuple(i for i, place in enumerate(servers) if is_here(place, own))
    local_workers = tuple(i for i, place in enumerate(workers) if is_here(place, own))
    if not local_servers and not local_workers:
        hosts = ", ".join(sorted({place.rpartition(":")[0] for place in (*servers, *workers)}))
        raise RoleError(
            f"none of the hosts {hosts} is this machine ({', '.join(sorted(own))}). Name it in --servers or --workers "
            "by one of these, or set POD_IP to the name it has in the lists."
        )
    return Layout(tuple(servers), tuple(workers), local_servers, local_workers)


def tasks(layout: Layout, num_workers: int, base: dict[str, str]) -> list[Task]:
    """Servers first. Threads of torch are dealt out so that the roles of a machine do not fight for its cores."""
    common = {
        **base,
        "FLEET_SERVER_ENDPOINTS": ",".join(layout.servers),
        "FLEET_NUM_WORKERS": str(num_workers),
        "PYTHONUNBUFFERED": "1",
    }
    if layout.workers:
        common["FLEET_WORKER_ENDPOINTS"] = ",".join(_numbered(layout.workers))
    threads = os.environ.get("OMP_NUM_THREADS") or str(
        max(1, (os.cpu_count() or 1) // max(1, len(layout.local_workers)))
    )
    started = [
        Task("server", i, {**common, "FLEET_ROLE": "SERVER", "FLEET_SERVER_INDEX": str(i), "OMP_NUM_THREADS": "1"})
        for i in layout.local_servers
    ]
    started += [
        Task("worker", i, {**common, "FLEET_ROLE": "WORKER", "FLEET_WORKER_INDEX": str(i), "OMP_NUM_THREADS": threads})
        for i in layout.local_workers
    ]
    return started


def free_ports(num: int) -> list[int]:
    """Ports that nobody uses right now; all held open until the last is found, so that they differ."""
    held = [socket.socket() for _ in range(num)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def own_addresses() -> set[str]:
    """Names and addresses under which this machine may stand in a list."""
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
    host = place.rpartition(":")[0].strip("[]")
    if host in own:
        return True
    try:
        return bool({str(found[4][0]) for found in socket.getaddrinfo(host, None)} & own)
    except OSError:
        return False


def _numbered(workers: Sequence[str]) -> list[str]:
    """Workers need no port (host:0); such entries get the first number that no other entry of the list has."""
    taken = {place for place in workers if not place.endswith(":0")}
    numbered = []
    for place in workers:
        free = (f"{place[:-2]}:{i}" for i in range(1, 1 << 16))
        numbered.append(next(one for one in free if one not in taken) if place.endswith(":0") else place)
        taken.add(numbered[-1])
    return numbered
