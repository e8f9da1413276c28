"""Servers that a nursery forks: real processes with streams, signals and exit statuses of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest
from support.messages import lines_naming
from support.scripts.launching import SOON, clean_environment, wait_until

from torchfleet.launch.job_spec import JobSpec, Task
from torchfleet.launch.roles import free_ports
from torchfleet.launch.server_nursery import ForkedServer, ServerNursery, nursery_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server nursery")]


@pytest.fixture(scope="module")
def nursery() -> Iterator[ServerNursery]:
    with contextlib.closing(ServerNursery()) as made:
        yield made


def start(nursery: ServerNursery, *options: str, **variables: str) -> ForkedServer:
    found = nursery.start(options, clean_environment(**variables))
    assert found is not None
    return found


def role(place: str) -> dict[str, str]:
    return {
        "FLEET_ROLE": "SERVER",
        "FLEET_SERVER_INDEX": "0",
        "FLEET_SERVER_ENDPOINTS": place,
        "FLEET_NUM_WORKERS": "1",
    }


def test_a_forked_server_has_an_output_and_an_exit_status_of_its_own(nursery: ServerNursery) -> None:
    first, second = start(nursery, "--version"), start(nursery, "--of_job", "--nonsense")
    for server, said in ((first, b"--version"), (second, b"--nonsense")):
        assert server.stdout
        assert said in server.stdout.read()
        assert server.wait() == 2
        assert server.poll() == 2
    assert first.pid != second.pid


def test_forked_servers_serve_share_memory_and_end_by_signals(nursery: ServerNursery) -> None:
    servers = [start(nursery, "--of_job", **role(f"127.0.0.1:{port}")) for port in free_ports(2)]
    for server in servers:
        assert server.stdout
        line = b""
        while b"listening" not in line:
            line = server.stdout.readline()
            assert line, "it ended"
        process = psutil.Process(server.pid)
        assert lines_naming(" ".join(process.cmdline()), "torchfleet", "server", "0")
        assert "nursery" not in " ".join(process.cmdline())
        assert os.getpgid(server.pid) == server.pid  # so that a launcher ends what it has started
        with open(f"/proc/{server.pid}/maps") as file:
            assert "libtorch" not in file.read()
        info = process.memory_full_info()
        assert info.rss < 250 << 20
        assert info.uss < 80 << 20  # the rest is shared
    os.killpg(servers[0].pid, signal.SIGTERM)
    os.killpg(servers[1].pid, signal.SIGKILL)
    assert [server.wait() for server in servers] == [-signal.SIGTERM, -signal.SIGKILL]


def test_a_server_to_which_no_worker_comes_says_so(nursery: ServerNursery) -> None:
    server = start(nursery, "--of_job", **role(f"127.0.0.1:{free_ports(1)[0]}"), FLEET_START_TIMEOUT="1")
    assert server.stdout
    lines = b""
    while b"FLEET_START_TIMEOUT" not in lines:
        line = server.stdout.readline()
        assert line, "it ended"
        lines += line
    assert lines_naming(lines.decode(), "FLEET_START_TIMEOUT", "FLEET_SERVER_ENDPOINTS", "server 0 of 1")
    assert server.poll() is None
    os.killpg(server.pid, signal.SIGTERM)
    server.wait()


def test_servers_end_with_their_nursery() -> None:
    with contextlib.closing(ServerNursery()) as nursery:
        server = start(nursery, "--of_job", **role(f"127.0.0.1:{free_ports(1)[0]}"))
        pid = server.pid
        (own,) = [child for child in psutil.Process().children() if child.pid == nursery._process.pid]
        own.kill()
        assert server.wait() < 0
        wait_until(lambda: not psutil.pid_exists(pid), SOON, "end of the server")
        wait_until(lambda: nursery._process.poll() is not None, SOON, "end of the nursery")
        assert nursery.start(["--version"], {}) is None  # the launcher then starts an interpreter


def test_a_nursery_that_has_not_started_yet_can_be_closed() -> None:
    nursery = ServerNursery()
    server = start(nursery, "--version")
    assert server.poll() in (None, 2)
    nursery.close()
    assert server.wait() in (2, -signal.SIGTERM, -signal.SIGKILL)


def test_an_environment_that_is_too_large_is_left_to_an_interpreter(nursery: ServerNursery) -> None:
    assert nursery.start(["--version"], {"X": "x" * (1 << 18)}) is None


def test_there_is_a_nursery_where_several_servers_do_without_the_script(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "train.py")
    bare = JobSpec(command, tmp_path, server_command=(sys.executable, "-m", "torchfleet.server"))  # type: ignore[arg-type]
    servers = [Task("server", i) for i in range(2)]
    monkeypatch.delenv("FLEET_FORK_SERVERS", raising=False)
    for job, tasks in ((bare, servers[:1]), (JobSpec(command, tmp_path), servers)):  # type: ignore[arg-type]
        with nursery_of(job, tasks) as made:
            assert made is None
    with nursery_of(bare, servers) as made:
        assert made is not None
    monkeypatch.setenv("FLEET_FORK_SERVERS", "0")
    with nursery_of(bare, servers) as made:
        assert made is None
