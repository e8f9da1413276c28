"""A real etcd, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from support.scripts.launching import wait_until

from torchfleet.coordination.etcd_coordinator import EtcdCoordinator
from torchfleet.errors import FleetError
from torchfleet.launch.roles import free_ports


@contextlib.contextmanager
def started_etcd() -> Iterator[str]:
    """host:port of it. The test is skipped where the program is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("the program etcd is not installed (apt-get install etcd-server)")
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["etcd", "--data-dir", folder, "--listen-client-urls", client, "--advertise-client-urls", client,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"],
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            place = client.removeprefix("http://")
            wait_until(lambda: _answers(place), 30, "answer of etcd")
            yield place
        finally:
            process.terminate()
            process.wait(10)


def _answers(place: str) -> bool:
    try:
        EtcdCoordinator([place], "any").read(0)
    except FleetError:
        return False
    return True
