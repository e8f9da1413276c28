"""A server before it serves, what workers are told meanwhile, and what it tells its launcher."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numba
import pytest
from support import jobs
from support.jobs import SECONDS, Net, make_part, sgd, strategy
from support.messages import lines_naming, naming

from torchfleet.api.job import worker_start
from torchfleet.api.job.server_role import ServerRole
from torchfleet.api.job.worker_start import wait_for_servers
from torchfleet.base.errors import FleetError, ServerLoading, ServerUnreachable
from torchfleet.base.role.role_info import SERVER, RoleInfo
from torchfleet.launch.roles import free_ports
from torchfleet.ps.server.job import job_server, server_run
from torchfleet.ps.server.job.warm import COMPILING
from torchfleet.ps.server.state.server_status import ServerStatus
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience


@pytest.fixture
def place() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def role(place: str) -> Iterator[ServerRole]:
    made = ServerRole(make_part(Net, sgd, strategy(), RoleInfo(SERVER, 0, 1, 0, (place,))).job)
    yield made
    made.end()
    made.close()


@pytest.fixture
def client(place: str) -> Iterator[Client]:
    with Client.connect([f"tcp://{place}"], patience=Patience(SECONDS, 2)) as made:
        yield made


class ClockOfAnswers:
    """Stands for `time`: seconds pass only as servers answer, so that a machine that stalls cannot seem to be a server
    that is silent."""

    sleep = staticmethod(time.sleep)

    def __init__(self, client: Client, look: Callable[[float], None]) -> None:
        """`look`: called with the time after each answer."""
        self._unready, self._look, self._now = client.unready, look, 0.0

    def monotonic(self) -> float:
        return self._now

    def unready(self, seconds: float) -> dict[str, str]:
        """Ask as the client does."""
        found = self._unready(seconds)
        self._now += 3.0 if all(found.values()) else 0.0
        self._look(self._now)
        return found


class ClockOfQuestions:
    """Stands for `time`: six seconds pass with every question, however long it takes."""

    sleep = staticmethod(lambda seconds: None)

    def __init__(self, client: Client) -> None:
        self._unready, self._now = client.unready, 0.0

    def monotonic(self) -> float:
        return self._now

    def unready(self, seconds: float) -> dict[str, str]:
        """Ask as the client does, and wait for little."""
        self._now += 6.0
        return self._unready(0.01)


def test_a_server_answers_while_it_loads_and_serves_when_it_runs(
    role: ServerRole, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def load_slowly(*arguments: object) -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    monkeypatch.setattr(job_server, "load_model", load_slowly)
    role.listen()

    def serve() -> None:
        role.load("models/today")
        role.run()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert begun.wait(SECONDS)
    assert list(client.unready(SECONDS).values()) == ["it is loading models/today"]
    with pytest.raises(ServerLoading, match=naming("models/today")):
        client.stats()
    clock = ClockOfAnswers(client, lambda now: go_on.set() if now > 30 else None)
    monkeypatch.setattr(worker_start, "time", clock)
    monkeypatch.setattr(client, "unready", clock.unready)
    wait_for_servers(client, 20.0)  # longer than that without an end: one that is loading gives signs
    assert lines_naming(capsys.readouterr().out, "server 0", "models/today")
    assert client.unready(SECONDS) == {}
    client.join({"host": "h", "pid": 1, "num_workers": 1, "timeout": 60.0, "sync_timeout": 60.0})
    client.leave()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_an_address_that_is_taken_is_an_error_before_anything_is_loaded(role: ServerRole, place: str) -> None:
    host, port = place.split(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        with pytest.raises(FleetError, match=naming(f"tcp://{place}")):
            role.listen()


def test_a_model_that_cannot_be_loaded_frees_the_address(role: ServerRole, place: str, tmp_path: Path) -> None:
    role.listen()
    with pytest.raises(FleetError):
        role.load(str(tmp_path / "nowhere"))
    with socket.socket() as free:
        host, port = place.split(":")
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((host, int(port)))


def test_a_server_that_never_comes_is_waited_for_aloud_and_named_in_the_end(
    client: Client, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ClockOfQuestions(client)
    monkeypatch.setattr(worker_start, "time", clock)
    monkeypatch.setattr(client, "unready", clock.unready)
    with pytest.raises(ServerUnreachable, match=naming("server 0", f"tcp://{place}", 20)) as raised:
        wait_for_servers(client, 20.0)
    assert "FLEET_START_TIMEOUT" in str(raised.value)
    assert lines_naming(capsys.readouterr().out, "server 0", f"tcp://{place}")


def test_a_server_that_compiles_its_kernels_says_so_to_those_who_wait(
    role: ServerRole,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """And to those who read its status: its memory has the compiler."""
    begun, go_on = threading.Event(), threading.Event()

    def compile_slowly(specs: object, are_copied: bool) -> None:
        numba.njit(lambda: 1)()  # kept nowhere: it is compiled here
        numba.njit(lambda: 2)()
        begun.set()
        assert go_on.wait(SECONDS)

    monkeypatch.setattr(server_run, "warm_up", compile_slowly)
    role._run._place = replace(role._run._place, status_file=str(tmp_path / "status"))
    role.listen()
    thread = threading.Thread(target=role.run, daemon=True)
    thread.start()
    assert begun.wait(SECONDS)
    assert list(client.unready(SECONDS).values()) == [f"it is {COMPILING}"]
    go_on.set()
    wait_for_servers(client, SECONDS)
    role.end()
    thread.join(SECONDS)
    assert capfd.readouterr().err.count(COMPILING) == 1
    assert json.loads((tmp_path / "status").read_text())["compiled"] is True


def test_the_rows_that_the_launcher_shows_are_those_of_sparse_tables(role: ServerRole) -> None:
    status = ServerStatus(role._server.state)._make()
    assert status["rows"] == dict.fromkeys(jobs.TABLES, 0)
    assert "compiled" not in status
    assert {name for name, table in status["tables"].items() if table["kind"] != "dense"} == set(jobs.TABLES)
