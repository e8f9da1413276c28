"""Where backups are placed, who decides, and options that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.messages import naming

from torchfleet.base.errors import RoleError
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.launch.cli import main
from torchfleet.launch.endurance.placement import coordination, coordinator_url, num_replicas, with_backups
from torchfleet.launch.roles import one_machine, several_machines, tasks
from torchfleet.ps.coordination.coordinators import VARIABLE


def test_a_backup_is_on_the_next_host_behind_all_ports() -> None:
    servers = ["a:7000", "a:7001", "b:7000", "c:7000"]
    assert with_backups(servers) == ["a:7000|b:7002", "a:7001|b:7003", "b:7000|c:7002", "c:7000|a:7002"]
    assert with_backups(["a:7000"]) == ["a:7000|a:7001"]
    with pytest.raises(RoleError, match=naming(65535)):
        with_backups(["a:65535"])


def test_every_process_learns_which_replica_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "b")
    layout = several_machines(with_backups(["a:7000", "b:7000"]), ["b:0"])
    assert (layout.local_servers, layout.local_backups, layout.is_all_here) == ((1,), (0,), False)
    made = tasks(layout, 1, {VARIABLE: "etcd://e:2379/run"})
    assert [task.name for task in made] == ["server 1", "server 0, replica 1", "worker 0"]
    assert len({task.log_name for task in made}) == 3
    first, backup, _ = (PaddleCloudRoleMaker(environment=task.environment).read() for task in made)
    assert (first.server_index, first.replica, first.replica_places) == (1, 0, ["b:7000", "a:7001"])
    assert (backup.server_index, backup.replica, backup.replica_places) == (0, 1, ["a:7000", "b:7001"])
    assert backup.coordinator == "etcd://e:2379/run"
    assert one_machine(2, 1, replicas=2).is_all_here


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"FLEET_REPLICA": "2"}, "FLEET_REPLICA 2"), ({VARIABLE: ""}, "FLEET_COORDINATOR")],
)
def test_a_server_with_replicas_must_know_which_it_is_and_who_decides(changed: dict[str, str], text: str) -> None:
    environment = tasks(one_machine(1, 1, replicas=2), 1, {VARIABLE: "etcd://e:2379/run"})[0].environment
    with pytest.raises(RoleError, match=naming(*text.split())):
        PaddleCloudRoleMaker(environment={**environment, **changed}).read()


def test_fleetrun_decides_on_one_machine_and_leaves_nothing_behind() -> None:
    with coordination(coordinator_url(None, 2, is_all_here=True), 2, 0) as variables:
        folder = Path(variables[VARIABLE].removeprefix("file://"))
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with coordination("etcd://e:2379/run", 2, 3) as variables:
        assert variables == {VARIABLE: "etcd://e:2379/run/3"}, "an attempt begins without a primary"
    assert num_replicas(None, {"FLEET_REPLICAS": "2"}) == 2
    with pytest.raises(RoleError, match=naming("FLEET_REPLICAS", 1, 2)):
        num_replicas(None, {"FLEET_REPLICAS": "3"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--coordinator", "etcd://e:1/run"], "there are none: add --replicas 2"),
        (["--replicas", "2", "--coordinator", "e:1"], "expected etcd://host:port/NAME"),
        (["--replicas", "2", "--durability", "log", "--cluster", "ray", "--log_store", "/l"], "--coordinator"),
        (
            ["--replicas", "2", "--servers", "127.0.0.1:7000,192.0.2.1:7000", "--workers", "127.0.0.1:0"],
            "a third party",
        ),
        (["--replicas", "2", "--simulate"], "leave --replicas out"),
        (["--no_wait_for_backups"], "there are none: add --replicas 2"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--dry_run", __file__]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("cluster", [[], ["--cluster", "ray", "--coordinator", "etcd://e:1/run"]])
def test_every_process_learns_that_nobody_waits_for_backups(
    cluster: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, num in ((["--no_wait_for_backups"], 3), ([], 0)):
        assert main([*cluster, "--replicas", "2", *flags, "--dry_run", __file__]) == 0
        assert capsys.readouterr().out.count("FLEET_WAIT_FOR_BACKUPS=0") == num


def test_workers_learn_how_often_they_are_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--max_restart", "3", "--dry_run", __file__]) == 0
    assert "FLEET_MAX_RESTART=3" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["FLEET_WAIT_FOR_BACKUPS", "FLEET_MAX_RESTART"])
def test_variables_of_no_sense_are_refused_by_name(name: str) -> None:
    environment = tasks(one_machine(1, 1), 1, {name: "often"})[0].environment
    with pytest.raises(RoleError, match=naming(name, "often")):
        PaddleCloudRoleMaker(environment=environment).read()
