"""Which processes a job has and with which environment they start; and processes started without fleetrun."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cases import each_of
from support.messages import naming
from support.scripts.launching import SOON, TINY, Forked

from torchfleet.base.errors import RoleError
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.launch import roles
from torchfleet.launch.roles import (
    PORTS,
    JobLayout,
    free_ports,
    given_threads,
    one_machine,
    own_addresses,
    several_machines,
    spare_servers,
    tasks,
)

SetAddresses = Callable[..., None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> SetAddresses:
    """Sets the addresses of this machine; nothing is looked up."""

    def set_addresses(*addresses: str) -> None:
        monkeypatch.setattr(roles, "own_addresses", lambda: set(addresses))

    return set_addresses


class TestJobLayout:
    def test_one_machine_has_every_role_on_loopback(self) -> None:
        layout = one_machine(3, 2)
        assert layout.local_servers == (0, 1, 2)
        assert layout.local_workers == (0, 1)
        assert len(set(layout.servers)) == 3
        assert all(place.startswith("127.0.0.1:") for place in layout.servers)

    def test_free_ports_differ_and_can_be_listened_on(self) -> None:
        ports = free_ports(50)
        assert len(set(ports)) == 50
        for port in ports[:5]:
            with socket.socket() as bound:
                bound.bind(("127.0.0.1", port))

    def test_ports_that_another_job_may_be_about_to_listen_on_are_passed_over(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(roles.random.SystemRandom, "randrange", lambda self, stop: 0)
        assert not set(free_ports(2)) & set(free_ports(2))
        assert free_ports(2, begin=0) == free_ports(2, begin=0)  # a task of Slurm that starts again takes its own port
        assert [roles._claim(PORTS[-1]), roles._claim(PORTS[-1])] == [True, False]
        for claim in tmp_path.glob("*/*"):
            os.utime(claim, (0, 0))  # long ago
        assert [roles._claim(PORTS[-1]), roles._claim(PORTS[-1])] == [True, False]
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        assert [roles._claim(PORTS[-1]), roles._claim(PORTS[-1])] == [True, True]

    def test_a_port_that_another_launcher_claims_at_the_same_moment_is_not_claimed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        touch = Path.touch

        def touch_after_another(path: Path, **options: Any) -> None:
            touch(path)
            touch(path, **options)

        with monkeypatch.context() as patches:
            patches.setattr(Path, "touch", touch_after_another)
            assert not roles._claim(PORTS[0])
        assert [roles._claim(PORTS[0]), roles._claim(PORTS[1])] == [False, True]

    def test_free_ports_are_not_those_of_outgoing_connections(self) -> None:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if lowest < PORTS.stop:
            pytest.skip(f"this system gives ports from {lowest} on to outgoing connections")
        assert max(free_ports(50)) < lowest

    def test_ports_that_are_taken_are_passed_over_and_too_few_are_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            monkeypatch.setattr(roles, "PORTS", range(port, port + 1))
            with pytest.raises(RoleError, match=naming(port)):
                free_ports(1)

    def test_every_machine_starts_its_own_part_of_the_same_lists(self, at: SetAddresses) -> None:
        servers, workers = ["192.0.2.1:7000", "192.0.2.2:7000"], ["192.0.2.2:0", "192.0.2.3:0", "192.0.2.2:0"]
        parts = []
        for address in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
            at(address)
            layout = several_machines(servers, workers)
            assert (list(layout.servers), list(layout.workers)) == (servers, workers)
            parts.append((layout.local_servers, layout.local_workers))
        assert parts == [((0,), ()), ((1,), (0, 2)), ((), (1,))]

    def test_a_machine_that_is_in_no_list_is_told_the_hosts_and_its_own_names(self, at: SetAddresses) -> None:
        at("192.0.2.9", "here")
        with pytest.raises(RoleError) as caught:
            several_machines(["192.0.2.1:7000"], ["192.0.2.2:0"])
        for part in ("192.0.2.1", "192.0.2.2", "192.0.2.9", "here", "POD_IP"):
            assert part in str(caught.value)

    def test_this_machine_is_known_by_loopback_host_name_and_pod_ip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POD_IP", "192.0.2.77")
        assert own_addresses() >= {"localhost", "127.0.0.1", socket.gethostname(), "192.0.2.77"}

    def test_an_ipv6_address_in_brackets_is_found_here(self, at: SetAddresses) -> None:
        at("::1")
        assert several_machines(["[::1]:7000"], ["[::1]:0"]).local_servers == (0,)


class TestTasks:
    def test_servers_come_first_and_each_task_has_its_log(self) -> None:
        made = tasks(one_machine(2, 2), 2, {})
        assert [task.name for task in made] == ["server 0", "server 1", "worker 0", "worker 1"]
        assert [task.log_name for task in made] == ["serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]

    @pytest.mark.parametrize(
        "layout",
        [
            one_machine(2, 3),
            one_machine(1, 3, num_heters=2),
            JobLayout(("192.0.2.1:7000", "192.0.2.2:7001"), ("192.0.2.2:0",) * 3, (1,), (0, 2)),
            JobLayout(("192.0.2.1:7000",), ("192.0.2.2:5000", "192.0.2.2:5001", "192.0.2.3:0"), (), (0, 1)),
        ],
        ids=["one machine", "heter workers", "several", "workers only"],
    )
    def test_each_process_finds_its_role_in_the_environment_it_gets(self, layout: JobLayout) -> None:
        for task in tasks(layout, 3, {}):
            info = PaddleCloudRoleMaker(environment=task.environment).read()
            assert info.role == task.role
            indexes = {"server": info.server_index, "worker": info.worker_index, "heter_worker": info.heter_index}
            assert task.index == indexes[task.role]
            assert info.heter_endpoints == layout.heters
            assert info.server_endpoints == layout.servers
            assert info.num_workers == 3
            assert len(info.worker_endpoints) == len(layout.workers)

    @each_of("workers", [("h:0", "h:0", "h:0"), ("h:2", "h:0"), ("h:0", "h:1"), ("h:0", "g:0", "h:3"), ("h:5", "h:6")])
    def test_workers_without_a_port_never_get_an_address_twice(self, workers: tuple[str, ...]) -> None:
        task = tasks(JobLayout(("h:7000",), workers, (0,), ()), len(workers), {})[0]
        info = PaddleCloudRoleMaker(environment=task.environment).read()
        assert [place.split(":")[0] for place in info.worker_endpoints] == [place.split(":")[0] for place in workers]

    def test_what_is_common_reaches_all(self) -> None:
        made = tasks(one_machine(1, 1), 1, {"FLEET_KEY_DIR": "/keys"})
        assert [task.environment["FLEET_KEY_DIR"] for task in made] == ["/keys", "/keys"]

    def test_threads_are_dealt_out_among_the_workers_of_a_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(roles, "usable_cores", lambda: 8)
        threads = {task.name: task.environment["OMP_NUM_THREADS"] for task in tasks(one_machine(1, 2), 2, {})}
        assert threads == {"server 0": "1", "worker 0": "4", "worker 1": "4"}

    def test_a_number_of_threads_set_by_the_user_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert tasks(one_machine(1, 9), 9, {})[-1].environment["OMP_NUM_THREADS"] == "3"

    def test_more_workers_than_cores_get_one_thread_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(roles, "usable_cores", lambda: 2)
        assert tasks(one_machine(1, 5), 5, {})[-1].environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.slow
def test_roles_set_in_code_train_without_a_launcher() -> None:
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, TINY, "--endpoint", endpoint]
    with Forked([*command, "--role", "server"]) as server, Forked([*command, "--role", "worker"]) as worker:
        assert worker.wait() == 0
        assert "worker 0 of 1 ends with loss" in worker.output
        assert server.wait(SOON) == 0


def test_a_worker_started_by_hand_says_which_variable_is_missing() -> None:
    with Forked([sys.executable, TINY], FLEET_ROLE="WORKER") as worker:
        assert worker.wait(SOON) != 0
    last = worker.output.strip().splitlines()[-1]
    assert "FLEET_SERVER_ENDPOINTS" in last
    assert "fleetrun" in last


@each_of(
    ("cores", "workers", "threads", "servers", "why"),
    [
        (16, 8, None, 8, "8 workers of 1 thread leave 8 of 16 cores, and a server uses one"),
        (16, 12, None, 4, "12 workers of 1 thread leave 4 of 16 cores"),
        (16, 4, None, 4, "leave 12 of 16 cores, and more servers than workers do not help"),
        (16, 4, 3, 4, "4 workers of 3 threads leave 4 of 16 cores, and a server uses one"),
        (16, 8, 4, 1, "8 workers of 4 threads leave 0 of 16 cores, and a job needs a server"),
        (2, 2, None, 1, "leave 0 of 2 cores, and a job needs a server"),
        (1, 1, None, 1, "1 worker of 1 thread leave 0 of 1 cores"),
    ],
)
def test_servers_get_the_cores_that_workers_leave(
    cores: int, workers: int, threads: int | None, servers: int, why: str
) -> None:
    chosen, told = spare_servers(cores, workers, threads)
    assert chosen == servers
    assert told.startswith(f"--server_num auto: {servers} server")
    assert why in told


def test_a_number_of_threads_that_is_none_is_an_error() -> None:
    assert (given_threads({}), given_threads({"OMP_NUM_THREADS": "4,2"})) == (None, 4)
    with pytest.raises(RoleError, match=naming("OMP_NUM_THREADS", 0, "'many'")):
        given_threads({"OMP_NUM_THREADS": "many"})
