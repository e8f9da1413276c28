"""At the limit of open files a server says so, turns newcomers away, and serves those who are in."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import psutil
import pytest
from support.fleets import WAIT
from support.grids import first_of
from support.messages import names, naming

from torchfleet.base.errors import FleetError
from torchfleet.ps.net.sockets import Listener
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

SERVE = """
import os, resource, sys, time
if len(sys.argv) > 3:
    close = os.close
    def close_and_wait(number):
        close(number)
        time.sleep(0.002)
    os.close = close_and_wait
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from torchfleet.ps.server.job.main import main
sys.exit(main(["--endpoint", "tcp://127.0.0.1:0"]))
"""


@contextlib.contextmanager
def server(*words: object):
    command = [sys.executable, "-c", SERVE, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().removeprefix("listening on ").strip()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("words", first_of([(), ("ZeroMQ is faster",)]))
def test_a_full_server_says_so_and_serves_those_who_are_in(words: tuple[str, ...]) -> None:
    """The second time, ZeroMQ always takes the descriptors that the server frees in order to turn newcomers away."""
    with server(100, 100, *words) as (process, endpoint), contextlib.ExitStack() as stack:
        client = stack.enter_context(Client.connect([endpoint], patience=Patience(WAIT, 1)))
        client.create_table(TableSpec("t", dim=1))
        place = (endpoint.removeprefix("tcp://").split(":")[0], int(endpoint.rpartition(":")[2]))
        crowd = [stack.enter_context(socket.create_connection(place, timeout=WAIT)) for _ in range(150)]
        assert process.stderr
        line = next(line for line in process.stderr if "is made" not in line)
        assert names(line, 100)
        spent = sum(psutil.Process(process.pid).cpu_times()[:2])
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            assert client.pull("t", [1]).result().tolist() == [[0]]
            time.sleep(0.01)
        assert client.num_retries == 0
        busy = (sum(psutil.Process(process.pid).cpu_times()[:2]) - spent) / (time.monotonic() - began)
        assert busy < 0.6, "those who wait at the door are not to keep the server busy"
        for gone in crowd:
            gone.close()
        with Client.connect([endpoint], patience=Patience(WAIT, 1)) as newcomer:
            newcomer.ping()
        assert process.poll() is None


@pytest.mark.slow
def test_the_limit_is_raised_as_far_as_the_system_allows() -> None:
    with server(64, 128) as (process, _):
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (128, 128)


def test_an_address_that_is_taken_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FleetError, match=naming(place)):
            Listener(place)
