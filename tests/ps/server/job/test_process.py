"""The server as a process: how it starts, how it ends, and that no client can make it grow or stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from support import processes
from support.extras import needs
from support.fleets import WAIT, ForkedServer, keys_of
from support.jobs import wait_until
from support.messages import names, naming

from torchfleet.base.errors import FleetError, ServerUnreachable
from torchfleet.launch.roles import free_ports
from torchfleet.observe.commands.server_stats import show_stats
from torchfleet.ps.net.wire import Command, Message, Role, encode
from torchfleet.ps.server.job.main import parse
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

pytestmark = pytest.mark.slow  # it starts processes

PATIENT = Patience(timeout=WAIT, retries=2)
MEGABYTE = 1 << 20
JOINED = {"host": "h", "pid": 1, "num_workers": 1, "timeout": 60.0, "sync_timeout": 60.0}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200, check=False)


REQUESTS_AFTER_WARM_UP = """
import importlib, itertools, pkgutil
import numpy as np
import torchfleet.ps.kernels
from torchfleet.ps.net.wire import Array, Command, Message, decode_reply, encode, pack
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.job.warm import warm_up
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec

def num_compiled():
    modules = [importlib.import_module(f"torchfleet.ps.kernels.{m.name}")
               for m in pkgutil.iter_modules(torchfleet.ps.kernels.__path__)]
    return {f"{module.__name__}.{name}": len(kernel.signatures)
            for module in modules for name, kernel in vars(module).items() if hasattr(kernel, "signatures")}

def one_byte_off(frame):
    data = np.frombuffer(bytes(memoryview(frame)), np.uint8)
    room = np.zeros(len(data) + 16, np.uint8)
    start = (1 - room.ctypes.data) % 8
    room[start:start + len(data)] = data
    return room[start:start + len(data)].data

def requests(spec):
    numbers = lambda *values: Array(spec.number, np.array(values, np.uint64))
    rows = Array(spec.number, np.ones((2, 2) if spec.dim == 2 else (4, 1), np.float32))
    keys = numbers(1, 2)
    yield Command.CREATE_TABLE, [pack(spec)]
    yield Command.PULL, [keys]
    yield Command.PUSH, [Array(0, np.array([np.nan])), numbers() if spec.kind == "dense" else keys, rows]
    yield Command.SET, [numbers(0) if spec.kind == "dense" else keys, rows]
    if spec.kind != "dense":
        yield Command.ERASE, [keys]

warm_up()
before = num_compiled()
server, numbers = Server(1 << 22), itertools.count(1)
for rule in map(Rule, ("sgd", "adagrad", "adam")):
    for spec in (TableSpec(rule.name + "1", dim=2, rule=rule), TableSpec(rule.name + "4", "dense", size=4, rule=rule),
                 TableSpec(rule.name + "2", dim=2, rule=rule, initializer=Initializer("uniform", -1.0, 1.0)),
                 TableSpec(rule.name + "3", "array", dim=2, size=9, rule=rule)):
        for command, arrays in requests(spec):
            number = next(numbers)
            frames = encode(Message(command, 3, 0, 0, 1, number, number, number, arrays))
            ((_, reply),) = server.handle(0, [one_byte_off(frame) for frame in frames], None)
            assert decode_reply(reply).status == 0, bytes(memoryview(reply[1]))
late = {name for name, num in num_compiled().items() if num != before[name]}
assert not late, f"compiled when the request was here: {late}"
"""


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read(), "utf-8")


class MuteServer(ServerProcess):
    """One whose process never says that it is ready."""

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        return subprocess.Popen(sleep, stdout=subprocess.PIPE, text=True)


class TestStart:
    def test_it_prints_the_address_that_it_listens_on_and_serves_metrics(self, monkeypatch: pytest.MonkeyPatch) -> None:
        needs("prometheus_client")
        (metrics,) = free_ports(1)
        monkeypatch.setenv("FLEET_METRICS_PORT", str(metrics))
        with ServerProcess() as server:
            host, port = server.endpoint.removeprefix("tcp://").split(":")
            assert host == "127.0.0.1"
            assert int(port) > 0
            once = Patience(timeout=WAIT, retries=0)  # a ping that is sent again is counted again
            with closing(Client.connect([server.endpoint], patience=once)) as client:
                client.ping()
                assert client.stats()[0]["pid"] == server.pid
                asked = 'torchfleet_server_requests_total{command="ping",index="0",role="server"} 1.0'
                wait_until(lambda: asked in scraped(metrics), "the request among the metrics")

    def test_it_listens_on_a_path(self, tmp_path: Path) -> None:
        with ForkedServer(f"ipc://{tmp_path}/s") as server:
            assert server.endpoint == f"ipc://{tmp_path}/s"
            with closing(Client.connect([server.endpoint], patience=PATIENT)) as client:
                client.ping()

    def test_a_port_in_use_is_a_clear_error(self) -> None:
        with ForkedServer() as first:
            command = [sys.executable, "-m", "torchfleet.server", "--endpoint", first.endpoint]
            ended = processes.run(command, timeout=200, stderr=subprocess.PIPE)
            assert ended.returncode == 2
            assert names(ended.stderr, first.endpoint, "Address already in use")
            assert "Traceback" not in ended.stderr
            with closing(Client.connect([first.endpoint], patience=PATIENT)) as client:
                client.ping()

    @pytest.mark.parametrize(
        "endpoint", ["nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:http", "ipc:///no/such/place/s"]
    )
    def test_an_address_that_is_none_is_a_clear_error(self, endpoint: str) -> None:
        command = [sys.executable, "-m", "torchfleet.server", "--endpoint", endpoint]
        ended = processes.run(command, timeout=200, stderr=subprocess.PIPE)
        assert ended.returncode == 2
        assert endpoint in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_starting_one_that_fails_raises_and_leaves_no_process(self) -> None:
        with pytest.raises(FleetError, match=naming("status 2")):
            ServerProcess("tcp://127.0.0.1")

    def test_starting_one_that_takes_too_long_raises_and_leaves_no_process(self) -> None:
        before = {child.pid for child in psutil.Process().children()}
        with pytest.raises(FleetError, match=naming("0.01")):
            MuteServer(timeout=0.01)
        assert {child.pid for child in psutil.Process().children()} <= before  # some may be gone meanwhile

    def test_a_bare_server_imports_no_torch(self) -> None:
        code = "import torchfleet.ps.server.job.main, sys; assert 'torch' not in sys.modules"
        ended = run("-c", code)
        assert ended.returncode == 0, ended.stderr

    def test_its_options_have_defaults_for_one_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FLEET_KEY_DIR", raising=False)
        options = parse([])
        assert options.endpoint == "tcp://127.0.0.1:0"
        assert (options.key_dir, options.insecure, options.num_workers) == (None, False, 0)

    def test_no_request_has_to_wait_for_a_compiler(self) -> None:
        """Requests as they come out of a socket, small and therefore unaligned, use kernels that are there already."""
        ended = run("-c", REQUESTS_AFTER_WARM_UP)
        assert ended.returncode == 0, ended.stderr


class TestEnd:
    @pytest.fixture
    def server(self) -> Iterator[ServerProcess]:
        with ForkedServer() as server:
            yield server

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
    def test_a_signal_ends_it_with_status_0(self, server: ServerProcess, number: signal.Signals) -> None:
        with closing(Client.connect([server.endpoint], patience=PATIENT)) as client:
            client.ping()
            os.kill(server.pid, number)
            assert server.wait(WAIT) == 0

    def test_a_signal_ends_it_in_the_middle_of_traffic(self, server: ServerProcess) -> None:
        with closing(Client.connect([server.endpoint], patience=PATIENT)) as client:
            client.create_table(TableSpec("t", dim=4))
            for i in range(200):
                client.pull("t", range(1000))
                if i == 100:
                    os.kill(server.pid, signal.SIGTERM)
                    break
            assert server.wait(WAIT) == 0

    def test_stop_ends_it_with_status_0_and_is_answered(self, server: ServerProcess) -> None:
        with closing(Client.connect([server.endpoint], role=Role.LAUNCHER, patience=PATIENT)) as client:
            client.stop_servers()
            assert server.wait(WAIT) == 0

    def test_it_ends_when_all_workers_have_left(self) -> None:
        with ForkedServer("tcp://127.0.0.1:0", "--num_workers", "2") as server:
            for worker in (0, 1):
                assert server.returncode is None
                with closing(Client.connect([server.endpoint], worker=worker, patience=PATIENT)) as client:
                    client.join({**JOINED, "num_workers": 2})
                    client.leave()
            assert server.wait(WAIT) == 0

    def test_closing_it_ends_it_and_closing_again_does_no_harm(self, server: ServerProcess) -> None:
        server.close(WAIT)
        assert server.returncode == 0
        server.close()

    def test_a_closed_one_is_unreachable(self, server: ServerProcess) -> None:
        server.kill()
        assert server.returncode == -signal.SIGKILL
        with (
            closing(Client.connect([server.endpoint], patience=Patience(0.5, 1))) as client,
            pytest.raises(ServerUnreachable, match=server.endpoint),
        ):
            client.ping()


def test_it_tells_for_what_share_of_the_time_it_computes(capsys: pytest.CaptureFixture[str]) -> None:
    with ForkedServer() as server, closing(Client.connect([server.endpoint], patience=PATIENT)) as client:
        client.create_table(TableSpec("t", dim=16, rule=Rule("adam")))
        client.join({**JOINED, "waiting": 0.7})
        time.sleep(2.1)  # two periods, of which the second is quiet from end to end
        wait_until(lambda: client.stats()[0]["busy"] is not None, "a period is over")  # it may not have run meanwhile
        idle = client.stats()[0]["busy"]
        deadline, busy = time.monotonic() + WAIT, idle
        while busy <= idle and time.monotonic() < deadline:
            for pulled in [client.pull("t", range(20_000)) for _ in range(4)]:
                pulled.result()
            busy = client.stats()[0]["busy"]
        show_stats(server.endpoint, None, as_json=False)
    assert 0 <= idle < busy <= 1  # of a core's time: on busy cores there is less of it
    told = capsys.readouterr().out
    assert re.search(r"\b\d+ s\b.*\b\d+%", told)
    assert re.search(r"\b\d+ %.*\b70 %", told)


class TestBounds:
    """One client misbehaves; the server stays small and the others are served."""

    SPEC = TableSpec("wide", dim=1024, rule=Rule("sgd", lr=1.0))
    KEYS = np.arange(256, dtype=np.uint64)  # rows of 4 kB: replies of 1 MB

    @pytest.fixture
    def server(self) -> Iterator[ServerProcess]:
        with ForkedServer("tcp://127.0.0.1:0", "--max_table_bytes", str(64 * MEGABYTE)) as server:
            yield server

    @pytest.fixture
    def client(self, server: ServerProcess) -> Iterator[Client]:
        with closing(Client.connect([server.endpoint], patience=PATIENT)) as client:
            client.create_table(self.SPEC)
            client.pull("wide", self.KEYS).result()
            yield client

    def test_a_client_that_never_reads_does_not_fill_the_memory(self, server: ServerProcess, client: Client) -> None:
        process = psutil.Process(server.pid)
        before = process.memory_info().rss
        with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
            deaf.set(zmq.LINGER, 0)
            deaf.set(zmq.RCVHWM, 1)
            deaf.set(zmq.RCVBUF, 65536)
            deaf.connect(server.endpoint)
            most = before
            for i in range(600):  # 600 MB of replies
                deaf.send_multipart(encode(Message(Command.PULL, call=i, arrays=[keys_of(self.SPEC, self.KEYS)])))
                if i % 50 == 0:
                    rows = client.pull("wide", self.KEYS[:4]).result()
                    assert rows.shape == (4, 1024)
                    most = max(most, process.memory_info().rss)
            deadline = time.monotonic() + WAIT
            while client.stats()[0]["requests"] < 600 and time.monotonic() < deadline:
                time.sleep(0.05)
            most = max(most, process.memory_info().rss)
            assert client.stats()[0]["requests"] >= 600, "the server was to take all requests"
        assert (most - before) / MEGABYTE < 150, "64 replies may wait for a client, and not more"

    def test_many_clients_that_come_and_go_leave_nothing_behind(self, server: ServerProcess, client: Client) -> None:
        process = psutil.Process(server.pid)

        def come_and_go(num: int) -> None:
            for _ in range(num):
                with closing(Client.connect([server.endpoint], patience=PATIENT)) as other:
                    other.ping()

        come_and_go(50)
        before, files = process.memory_info().rss, process.num_fds()
        come_and_go(300)
        deadline = time.monotonic() + WAIT
        while process.num_fds() > files + 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.num_fds() <= files + 5
        assert (process.memory_info().rss - before) / MEGABYTE < 20
        client.ping()


FLOOD = """
import os, sys, time
import numpy as np, zmq
from torchfleet.ps.net.wire import Array, Command, Message, encode
with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
    flood.set(zmq.SNDHWM, 0)
    flood.connect(sys.argv[1])
    keys = Array(int(sys.argv[2]), np.arange(100_000, dtype=np.uint64))
    for call in range(400):
        flood.send_multipart(encode(Message(Command.PULL, client=5, call=call, arrays=[keys])))
    time.sleep(0.8)
    os.kill(os.getpid(), 9)
"""


def test_a_client_that_is_killed_while_its_requests_fill_the_queue_does_not_end_the_server() -> None:
    """ZeroMQ's heartbeats of the server did: they are due every five seconds."""
    spec = TableSpec("t", dim=64)
    with ForkedServer() as server, closing(Client.connect([server.endpoint], patience=PATIENT)) as client:
        client.create_table(spec)
        client.pull("t", range(100_000)).result()
        assert run("-c", FLOOD, server.endpoint, str(spec.number)).returncode == -signal.SIGKILL
        time.sleep(6.0)
        assert server.returncode is None
        client.ping()


def test_it_ends_when_the_workers_that_were_there_are_gone() -> None:
    options = ("--num_workers", "2", "--orphan_timeout", "10")
    with ForkedServer("tcp://127.0.0.1:0", *options) as server:
        with closing(Client.connect([server.endpoint], patience=PATIENT)) as client:
            client.join({**JOINED, "num_workers": 2})
            assert server.returncode is None
        assert server.wait(WAIT) == 1
    assert run("-m", "torchfleet.server", "--orphan_timeout", "-1").returncode == 2
