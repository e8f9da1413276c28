"""An etcd of our own on the first machine: which of two replicas is primary is decided there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.chaos.machines import Machines
from benchmarks.links import LinkError
from torchfleet.base.errors import FleetError
from torchfleet.ps.coordination.coordinators import make_coordinator

_START = 60.0
_PORTS = (2379, 2380)


@contextlib.contextmanager
def started_etcd(network: Machines, ask: Callable[[Callable[[], Any]], Any]) -> Iterator[str]:
    """host:port of it. `ask` calls a function as the first machine. Raises LinkError if there is none."""
    if shutil.which("etcd") is None:
        raise LinkError("servers with backups on several machines need etcd: apt-get install etcd-server")
    place = f"{network.addresses[0]}:{_PORTS[0]}"
    client, peer = (f"http://{network.addresses[0]}:{port}" for port in _PORTS)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--data-dir", folder, "--listen-client-urls", client, "--advertise-client-urls", client]
        options += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        process = subprocess.Popen(
            network.inside(0, "etcd", *options, "--initial-cluster", f"default={peer}"),
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait(place, ask)
            yield place
        finally:
            process.terminate()
            process.wait(10)


def _wait(place: str, ask: Callable[[Callable[[], Any]], Any]) -> None:
    deadline = time.monotonic() + _START
    while True:
        try:
            ask(lambda: make_coordinator(f"etcd://{place}/any").read(0))
        except FleetError as error:
            if time.monotonic() > deadline:
                raise LinkError(f"etcd does not answer: {error}") from None
            time.sleep(0.05)
        else:
            return
