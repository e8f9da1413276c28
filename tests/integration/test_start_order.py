"""Roles that a scheduler starts in any order, minutes apart, on machines whose names are not known yet or move."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from support.messages import lines_naming
from support.scripts.launching import SOON, START, TINY, Forked, Started

from torchfleet.launch.roles import free_ports

pytestmark = pytest.mark.slow

NAME = "torchfleet-test-server"
# What a worker does: it connects by name, is heard, and asks again when it is told to.
CLIENT = """
import os, sys, time
from torchfleet.api.job.worker_start import wait_for_servers
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience
with Client.connect([sys.argv[1]], patience=Patience(60.0, 3, 1.0)) as client:
    wait_for_servers(client, 60.0)
    print("heard", flush=True)
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    client.ping()
    print("heard again", flush=True)
"""


def test_workers_come_before_servers_and_worker_0_comes_last() -> None:
    place = f"127.0.0.1:{free_ports(1)[0]}"
    common = {"FLEET_NUM_WORKERS": "2", "FLEET_SERVER_ENDPOINTS": place, "FLEET_ROLE": "WORKER"}

    def worker(index: int, stack: contextlib.ExitStack) -> Started:
        own = {**common, "FLEET_WORKER_INDEX": str(index)}
        return stack.enter_context(Forked([sys.executable, TINY, "--steps", "3"], **own))

    with contextlib.ExitStack() as stack:
        second = worker(1, stack)
        second.wait_for(f"server 0 (tcp://{place})", START)
        options = ("--endpoint", f"tcp://{place}", "--num_workers", "2")
        server = stack.enter_context(Forked([sys.executable, "-m", "torchfleet.server", *options]))
        second.wait_for("worker 0 of 2", START)
        first = worker(0, stack)
        assert (first.wait(START), second.wait(START), server.wait(START)) == (0, 0, 0)


def test_a_worker_that_never_comes_is_named_at_the_end() -> None:
    place = f"127.0.0.1:{free_ports(1)[0]}"
    own = {"FLEET_NUM_WORKERS": "3", "FLEET_SERVER_ENDPOINTS": place, "FLEET_ROLE": "WORKER", "FLEET_WORKER_INDEX": "1"}
    options = ("--endpoint", f"tcp://{place}", "--num_workers", "3")
    with Forked([sys.executable, "-m", "torchfleet.server", *options]) as server:
        server.wait_for(f"tcp://{place}")  # it listens
        with Forked([sys.executable, TINY], FLEET_START_TIMEOUT="6", **own) as worker:
            assert worker.wait(START) != 0
        assert lines_naming(worker.output, 6, "FLEET_START_TIMEOUT", "worker 0", "worker 2", 3), worker.output
        server.process.terminate()
        server.wait(SOON)


@pytest.fixture
def own_hosts(tmp_path: Path) -> tuple[Path, list[str]]:
    """A file in the place of /etc/hosts, and the command under which a process sees it."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    command = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False, timeout=200).returncode:
        pytest.skip("a mount namespace of its own is not permitted here")
    return hosts, command


@pytest.mark.long
def test_a_name_that_comes_late_and_then_moves_is_found(own_hosts: tuple[Path, list[str]], tmp_path: Path) -> None:
    hosts, command = own_hosts
    (port,) = free_ports(1)

    def server(address: str) -> Started:
        place = ("--endpoint", f"tcp://{address}:{port}", "--durability", "log", "--log_store", str(tmp_path / "log"))
        return Forked([sys.executable, "-m", "torchfleet.server", *place])

    def publish(address: str) -> None:
        hosts.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

    run = [*command, sys.executable, "-c", CLIENT, f"tcp://{NAME}:{port}", str(tmp_path / "go_on")]
    with server("127.0.0.2") as first, Started(run) as client:
        first.wait_for("listening on", START)
        client.wait_for("its name is not known yet", START)
        publish("127.0.0.2")
        client.wait_for("heard", START)
        first.process.kill()
        first.process.wait(SOON)
        publish("127.0.0.3")
        with server("127.0.0.3") as second:
            second.wait_for("listening on", START)
            (tmp_path / "go_on").touch()
            client.wait_for("heard again", START)
            assert client.wait(START) == 0
            second.process.terminate()
            second.wait(SOON)
