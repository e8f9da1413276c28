"""The rendezvous of a hybrid job: worker 0 runs a store of torch.distributed, and the servers publish its address.

The address is sent like all data between workers and servers: authenticated and encrypted if there are keys. The
traffic between workers is not (docs/security.md).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from torchfleet.base.errors import FleetError, RoleError, WorkerMissing
from torchfleet.base.monitor.notices import tell
from torchfleet.base.prepared_types import prepared
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.net.keys import is_private

Gather = Callable[[str, bytes], list[bytes]]  # (name, this worker's data): the data of all workers

_PAUSE = 0.2  # seconds between two requests for workers that have not returned yet
_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


class Place(msgspec.Struct):
    """What a worker publishes to the others."""

    device: str  # cpu or cuda
    gpu: str = ""  # the id of the GPU
    host: str = ""  # of worker 0: where its store listens
    port: int = 0
    token: str = ""  # prefix of every key in the store, a secret


def join_group(info: RoleInfo, device: torch.device, timeout: float, gather: Gather) -> Store | None:
    """Create the process group of all workers. All workers must call it together.

    Returns an additional store that they share, or None for a single worker. FLEET_DIST_BACKEND overrides torch's
    default backend for the device.
    """
    own = Place(device.type, _gpu(device))
    places, store, shared = ([own], HashStore(), None) if info.num_workers == 1 else _meet(info, own, timeout, gather)
    backend = os.environ.get("FLEET_DIST_BACKEND") or usual_backend(places)
    if backend == "gloo" and device.type == "cuda" and info.worker_index == 0:
        tell("hybrid mode: workers share a GPU, which NCCL refuses; the network is exchanged by gloo, which is slower")
    dist.init_process_group(
        backend, store=store, rank=info.worker_index, world_size=info.num_workers, timeout=timedelta(seconds=timeout)
    )
    return shared


def usual_backend(places: Sequence[Place]) -> str:
    """NCCL for GPUs, unless two workers share one."""
    gpus = [place.gpu for place in places]
    return "nccl" if places[0].device == "cuda" and len(set(gpus)) == len(gpus) else "gloo"


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _meet(info: RoleInfo, own: Place, timeout: float, gather: Gather) -> tuple[list[Place], Store, Store]:
    """The places of all workers, and two stores: one for the process group, and one with its own connection."""
    host = _own_address(info)
    if host != _LOOPBACK and not info.insecure:
        raise RoleError(
            "hybrid mode on several machines: the workers exchange the network by torch.distributed, which neither "
            "encrypts nor authenticates. Say --insecure (FLEET_INSECURE=1) if this network is your own; keys still "
            "guard the servers."
        )
    serving = None
    if info.worker_index == 0:
        serving, port = _serve(host, timeout)
        own = Place(own.device, own.gpu, host, port, secrets.token_hex(16))
    brought = _gather_all(info, msgspec.json.encode(own), gather)
    places = [msgspec.json.decode(each, type=prepared(Place)) for each in brought]
    if len(places) != info.num_workers:
        raise FleetError(
            f"{len(places)} of {info.num_workers} workers came to train the network together: the others have left. "
            "In hybrid mode all workers train to the end; look at the logs of those that left."
        )
    _check_devices(places)
    _use_interface_of(host)
    first, wait = places[0], timedelta(seconds=timeout)
    store = serving or TCPStore(first.host, first.port, None, False, wait)
    shared = TCPStore(first.host, first.port, None, False, wait)
    return places, PrefixStore(first.token, store), PrefixStore(f"{first.token} shared", shared)


def _gather_all(info: RoleInfo, own: bytes, gather: Gather) -> list[bytes]:
    """The data of all workers. Retries, since after a restart some of the ended workers may not have returned yet."""
    deadline = time.monotonic() + info.start_timeout
    while True:
        try:
            # The name contains the restart number, so that data of earlier processes is not used.
            return gather(f"hybrid network, start {info.restart}", own)
        except WorkerMissing:
            if not info.restart or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)


def _own_address(info: RoleInfo) -> str:
    """The local address with which this machine reaches server 0. The other workers use it to reach this worker."""
    if all(is_private(f"tcp://{place}") for place in info.server_places):
        return _LOOPBACK
    host, _, port = info.server_places[0].rpartition(":")
    family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(place)  # sends nothing: the system only selects a route
        return str(asking.getsockname()[0])


def _serve(host: str, timeout: float) -> tuple[Store, int]:
    """A store that listens only on this address, on a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        port = int(listening.getsockname()[1])
        wait, fd = timedelta(seconds=timeout), listening.detach()
        return TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=fd), port


def _check_devices(places: list[Place]) -> None:
    kinds = [place.device for place in places]
    if len(set(kinds)) > 1:
        found = ", ".join(f"worker {worker} on {kind}" for worker, kind in enumerate(kinds))
        raise FleetError(f"hybrid mode: the network is on different kinds of devices: {found}. Put it on one kind.")


def _use_interface_of(host: str) -> None:
    """Set gloo's interface. By default gloo resolves the machine's name, which may give another address."""
    if "GLOO_SOCKET_IFNAME" in os.environ or ":" in host:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == host:
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return
