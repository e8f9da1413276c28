"""A real etcd, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from support.scripts.launching import SOON, wait_until

from torchfleet.base.errors import FleetError
from torchfleet.launch.roles import free_ports
from torchfleet.ps.coordination.etcd_coordinator import EtcdCoordinator
from torchfleet.ps.coordination.etcd_gateway import Access, EtcdGateway

_PLAIN = Access()


@contextlib.contextmanager
def started_etcd(*options: str, access: Access = _PLAIN) -> Iterator[str]:
    """host:port of it. The test is skipped where the program is not installed. `options`: of etcd, `access`: how it is
    asked then."""
    if shutil.which("etcd") is None:
        pytest.skip("needs the program etcd (apt-get install etcd-server)")
    places = [f"127.0.0.1:{port}" for port in free_ports(2)]
    client, peer = f"http{'s' if access.tls else ''}://{places[0]}", f"http://{places[1]}"
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["etcd", "--data-dir", folder, "--listen-client-urls", client, "--advertise-client-urls", client,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
             *options],
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until(lambda: _answers(places[0], access), SOON, "answer of etcd")
            yield places[0]
        finally:
            process.terminate()
            process.wait(SOON)


def _answers(place: str, access: Access) -> bool:
    try:
        EtcdCoordinator(EtcdGateway([place], access), "any").read(0)
    except FleetError:
        return False
    return True
