"""fleetrun: its command line, what it prints, and jobs that go well. What goes wrong is in test_supervisor.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.messages import lines_naming, names
from support.paths import ROOT
from support.scripts.launching import TINY, fleetrun, forked_fleetrun, run_dir

import torchfleet
from torchfleet.launch import cli, roles, server_launcher
from torchfleet.launch.processes import script_command
from torchfleet.launch.roles import free_ports
from torchfleet.observe.commands.command import main as fleet_command
from torchfleet.ps.net.keys import KeyFolder, keygen
from torchfleet.ps.net.wire import Role

LISTS = ("--servers", "127.0.0.1:7000", "--workers", "127.0.0.1:0")


@pytest.fixture(autouse=True)
def no_keys_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEET_KEY_DIR", raising=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('nobody should start this')\n")
    return str(path)


def status_of(*arguments: str) -> int:
    """What fleetrun returns, in this process. argparse leaves by SystemExit."""
    try:
        return cli.main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


class TestRefusedCommandLines:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--server_num", "0"), "--server_num and --worker_num must be at least 1, found 0 and 1"),
            (("--worker_num", "0"), "must be at least 1, found 1 and 0"),
            (("--server_num", "-2"), "must be at least 1, found -2"),
            (("--server_num", "two"), "--server_num: expected a number, or auto; found 'two'"),
            (("--server_num", "auto", "--worker_num", "0"), "must be at least 1, found 1 and 0"),
            (("--server_num", "auto", *LISTS), "use one"),
            (("--server_num", "1", *LISTS), "use one"),
            (("--worker_num", "1", "--servers", "127.0.0.1:7000"), "use one"),
            (LISTS[:2], "--servers and --workers"),
            (LISTS[2:], "--servers and --workers"),
            (("--durability", "log", "--fsync_ms", "-3"), "--fsync_ms must be a number of milliseconds from 0"),
            (("--fsync_ms", "nan"), "--fsync_ms must be a number of milliseconds from 0"),
            (("--max_restart", "-1"), "--max_restart must be at least 0, found -1"),
            (("--max_restart", "often"), "invalid int value: 'often'"),
            (("--max_table_bytes", "much"), "--max_table_bytes must be a number of bytes above 0, such as 8GB"),
            (("--max_table_bytes", "0"), "--max_table_bytes must be a number of bytes above 0"),
            (("--max_table_bytes", "8GB", "--nproc_per_node", "2"), "use one kind"),
            (("--orphan_timeout", "0.5"), "--orphan_timeout must be 0 or a number of seconds from 1 to 604800"),
            (("--orphan_timeout", "60", "--nproc_per_node", "2"), "use one kind"),
            (("--simulate", *LISTS), "leave --servers, --workers out"),
            (("--simulate", "--gpus", "0", "--max_restart", "1"), "leave --gpus, --max_restart out"),
            (("--simulate", "--trace_every", "10", "--verbose"), "leave --verbose, --trace_every out"),
            (("--simulate", "--worker_num", "0"), "must be at least 1, found 1 and 0"),
            (("--simulate", "--link", "10"), "--link 10: expected a bandwidth in Mbit or Gbit"),
            (("--simulate", "--step_ms", "0"), "--step_ms must be a number above 0, found 0"),
            (("--simulate", "--step_ms", "5", "--compute_scale", "2"), "use one of them"),
            (("--link", "10Gbit", "--throughput_only"), "--link, --throughput_only describe a simulation"),
            (("--no_such_option",), "unrecognized arguments: --no_such_option"),
            (("--worker-num", "2"), "--worker_num?"),
            (("--sever_num=2",), "--server_num?"),
        ],
    )
    def test_a_wrong_option_is_refused_with_status_2(
        self, capsys: pytest.CaptureFixture[str], script: str, arguments: tuple[str, ...], message: str
    ) -> None:
        assert status_of("--dry_run", *arguments, script) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--heter_worker_num", "0"),
            ("--heter_worker_num", "1", "--worker_num", "1:2"),
            ("--heter_worker_num", "1", "--nproc_per_node", "2"),
            ("--heter_worker_num", "1", "--simulate"),
            ("--heter_worker_num", "1", "--cluster", "ray"),
            ("--heter_worker_num", "1", *LISTS),
            ("--heter_workers", "127.0.0.1:7100"),
            ("--heter_workers", "127.0.0.1:0", *LISTS),
            ("--heter_workers", "127.0.0.1:7100,127.0.0.1:7100", *LISTS),
            ("--heter_workers", LISTS[1].split(",")[0], *LISTS),
            ("--heter_workers", "192.0.2.1:7100,127.0.0.1:7101", "--private", "ipc", *LISTS),
        ],
    )
    def test_heter_workers_where_there_can_be_none_are_refused(
        self, capsys: pytest.CaptureFixture[str], script: str, arguments: tuple[str, ...]
    ) -> None:
        assert status_of("--dry_run", *arguments, script) == 2
        assert lines_naming(capsys.readouterr().err, "fleetrun")

    @pytest.mark.parametrize("place", ["127.0.0.1", "127.0.0.1:", ":7000", "127.0.0.1:http", "7000"])
    @pytest.mark.parametrize("option", ["--servers", "--workers"])
    def test_a_malformed_address_is_shown_with_its_option(
        self, capsys: pytest.CaptureFixture[str], script: str, option: str, place: str
    ) -> None:
        lists = dict(zip(LISTS[::2], LISTS[1::2], strict=True)) | {option: f"127.0.0.1:7001,{place}"}
        assert status_of("--dry_run", *(part for pair in lists.items() for part in pair), script) == 2
        told = capsys.readouterr().err
        assert option in told
        assert "host:port" in told
        assert repr(place) in told

    @pytest.mark.parametrize(
        "servers",
        [
            "127.0.0.1:70000",
            "127.0.0.1:²",
            "127.0.0.1:0",
            "0.0.0.0:7000",
            "[::]:7000",
            "*:7000",
            ",",
            "127.0.0.1:7000,127.0.0.1:7000",
            "127.0.0.1:7000*2,127.0.0.1:7001",
            "127.0.0.1:7000*",
            "127.0.0.1:7000*0",
            "127.0.0.1:7000*-1",
            "127.0.0.1:65535*2",
            "127.0.0.1:0*4",
            "127.0.0.1:7000*99999999999999999999",
        ],
    )
    def test_servers_that_no_worker_could_find_are_refused_before_anything_starts(
        self, capsys: pytest.CaptureFixture[str], script: str, servers: str
    ) -> None:
        assert status_of("--dry_run", "--servers", servers, "--workers", "127.0.0.1:0", script) == 2
        assert "--servers" in capsys.readouterr().err

    def test_every_address_of_loopback_is_this_machine(self, capsys: pytest.CaptureFixture[str], script: str) -> None:
        assert status_of("--dry_run", "--servers", "127.0.0.5:7000", "--workers", "127.0.0.1:0", script) == 0
        assert names(capsys.readouterr().out, "server 0", "worker 0")

    def test_a_folder_of_server_logs_that_cannot_be_made_is_named_before_anything_starts(
        self, capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        wanted, logs = tmp_path / "file" / "store", tmp_path / "log"
        arguments = ("--log_dir", str(logs), "--durability", "log", "--log_store", str(wanted), script)
        assert status_of(*arguments) == 2
        assert names(capsys.readouterr().err, "--log_store", wanted)
        assert not logs.exists()

    @pytest.mark.parametrize("what", ["open to all", "open to a group", "a link", "a file"])
    def test_a_folder_of_server_logs_that_others_can_change_is_refused_before_anything_starts(
        self, capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path, what: str
    ) -> None:
        (tmp_path / "folder").mkdir(0o700)
        store, logs = tmp_path / "store", tmp_path / "log"
        if what == "a link":
            store.symlink_to(tmp_path / "folder")
        elif what == "a file":
            store.touch()
        else:
            store.mkdir()
            store.chmod(0o777 if what == "open to all" else 0o770)
        arguments = ("--log_dir", str(logs), "--durability", "log", "--log_store", str(store), script)
        assert status_of(*arguments) == 2
        assert names(capsys.readouterr().err, "--log_store", store)
        assert not logs.exists()

    def test_a_log_of_one_server_without_the_others_is_refused_before_anything_starts(
        self, capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
    ) -> None:
        store, logs = tmp_path / "store", tmp_path / "log"
        (store / "server-1").mkdir(mode=0o700, parents=True)
        store.chmod(0o700)
        (store / "server-1" / "start").touch()
        arguments = ("--log_dir", str(logs), "--durability", "log", "--log_store", str(store), "--server_num", "3")
        assert status_of(*arguments, script) == 2
        assert names(capsys.readouterr().err, "--log_store", store / "server-1", store / "server-0")
        assert not logs.exists()
        assert sorted(store.iterdir()) == [store / "server-1"]

    def test_no_script_is_refused_with_the_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert status_of("--server_num", "2") == 2
        assert "fleetrun" in capsys.readouterr().err

    def test_a_script_that_is_not_there_is_named(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for path in (tmp_path / "missing.py", tmp_path):
            assert status_of("--dry_run", str(path)) == 2
            assert lines_naming(capsys.readouterr().err, path)

    def test_hosts_that_are_not_here_are_listed(
        self, capsys: pytest.CaptureFixture[str], script: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(roles, "own_addresses", lambda: {"127.0.0.1"})
        arguments = ("--servers", "192.0.2.1:7000", "--workers", "192.0.2.2:0,192.0.2.3:0")
        assert status_of("--dry_run", *arguments, script) == 2
        told = capsys.readouterr().err
        for host in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
            assert host in told

    def test_a_folder_of_logs_that_cannot_be_made_is_named(
        self, capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
    ) -> None:
        (tmp_path / "log").write_text("a file")
        assert status_of("--log_dir", str(tmp_path / "log"), script) == 2
        assert lines_naming(capsys.readouterr().err, tmp_path / "log")

    def test_help_shows_every_option_that_works_and_none_that_does_not(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert status_of("--help") == 0
        told = capsys.readouterr().out
        for name in ("server_num", "worker_num", "servers", "workers", "log_dir", "max_restart", "key_dir", "insecure"):
            assert f"--{name}" in told
        for name in ("nproc_per_node", "gpus", "nnodes", "master", "rank", "ips"):
            assert f"--{name}" in told
        assert "--heter_worker_num" in told
        assert "--heter_devices" not in told


class TestDryRun:
    def test_it_prints_heter_workers(self, capsys: pytest.CaptureFixture[str], script: str) -> None:
        assert status_of("--dry_run", "--worker_num", "2", "--heter_worker_num", "2", script) == 0
        told = capsys.readouterr().out
        assert lines_naming(told, "heter_worker 1:", "heterlog.1")
        assert told.count("FLEET_ROLE=HETER_WORKER") == 2
        assert told.count("FLEET_HETER_ENDPOINTS=127.0.0.1:") == 5
        assert "FLEET_HETER_INDEX=1" in told
        lists = ("--servers", "127.0.0.1:7000", "--workers", "192.0.2.1:0*3", "--heter_workers", "127.0.0.1:7100*2")
        assert status_of("--dry_run", "--insecure", *lists, script) == 0
        assert "FLEET_HETER_ENDPOINTS=127.0.0.1:7100,127.0.0.1:7101" in capsys.readouterr().out

    def test_it_prints_every_task_with_its_environment_and_starts_nothing(
        self, capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
    ) -> None:
        before = psutil.Process().children(recursive=True)
        log_dir = tmp_path / "log"
        arguments = ("--log_dir", str(log_dir), "--server_num", "2", "--worker_num", "2", "--dry_run")
        assert status_of(*arguments, script, "--epochs", "3") == 0
        private, *blocks = re.split(r"^(?=\S)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
        assert private.startswith("private: ")
        heads = [block.splitlines()[0] for block in blocks]
        command = " ".join(script_command(script, ["--epochs", "3"]))
        for head, name in zip(heads, ("server 0", "server 1", "worker 0", "worker 1"), strict=True):
            assert head.startswith(f"{name}: {command}")
            assert str(log_dir / "latest" / name.replace(" ", "log.")) in head
        found = [dict(line.strip().split("=", 1) for line in block.splitlines()[1:]) for block in blocks]
        assert [env["FLEET_ROLE"] for env in found] == ["SERVER", "SERVER", "WORKER", "WORKER"]
        assert [env.get("FLEET_SERVER_INDEX", env.get("FLEET_WORKER_INDEX")) for env in found] == [
            "0",
            "1",
            "0",
            "1",
        ]
        assert len({env["FLEET_SERVER_ENDPOINTS"] for env in found}) == 1
        assert not log_dir.exists()
        assert set(psutil.Process().children(recursive=True)) <= set(before)  # some of earlier tests may end meanwhile

    def test_options_behind_the_script_are_the_scripts(self, capsys: pytest.CaptureFixture[str], script: str) -> None:
        assert status_of("--worker_num", "1", "--dry_run", script, "--worker_num", "7", "-x", "--help") == 0
        told = capsys.readouterr()
        assert f"{script} --worker_num 7 -x --help" in told.out
        assert "FLEET_NUM_WORKERS=1" in told.out
        assert lines_naming(told.err, "--worker_num")

    def test_options_of_the_script_with_other_names_are_not_mentioned(
        self, capsys: pytest.CaptureFixture[str], script: str
    ) -> None:
        assert status_of("--worker_num", "1", "--dry_run", script, "--workers", "7", "--epochs=3") == 0
        assert capsys.readouterr().err == ""

    def test_the_number_of_servers_is_chosen_by_the_cores_and_said(
        self, capsys: pytest.CaptureFixture[str], script: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        for module in (roles, server_launcher):
            monkeypatch.setattr(module, "usable_cores", lambda: 16)
        assert status_of("--server_num", "auto", "--worker_num", "4", "--dry_run", script) == 0
        told = capsys.readouterr().out
        assert names(told.splitlines()[0], "--server_num auto", "4 servers", 12, 16)
        assert re.findall(r"^(\w+) \d:", told, flags=re.MULTILINE) == ["server"] * 4 + ["worker"] * 4
        assert re.findall(r"OMP_NUM_THREADS=(\d+)", told) == ["1"] * 4 + ["3"] * 4  # a core is left to every server

    def test_a_star_is_as_many_ports_or_workers(self, capsys: pytest.CaptureFixture[str], script: str) -> None:
        lists = ("--servers", "127.0.0.1:7000*3,127.0.0.1:7009", "--workers", "127.0.0.1:0*2")
        assert status_of("--dry_run", *lists, script) == 0
        told = capsys.readouterr().out
        servers = ",".join(f"127.0.0.1:{port}" for port in (7000, 7001, 7002, 7009))
        assert f"FLEET_SERVER_ENDPOINTS={servers}\n" in told
        assert "FLEET_NUM_WORKERS=2\n" in told

    def test_addresses_of_this_machine_are_one_machine(self, capsys: pytest.CaptureFixture[str], script: str) -> None:
        servers = "127.0.0.1:7000,localhost:7001"
        assert status_of("--servers", servers, "--workers", "127.0.0.1:0,127.0.0.1:0", "--dry_run", script) == 0
        told = capsys.readouterr().out
        names = re.findall(r"^(\w+ \d):", told, flags=re.MULTILINE)
        assert names == ["server 0", "server 1", "worker 0", "worker 1"]
        assert f"FLEET_SERVER_ENDPOINTS={servers}" in told


class TestPrivacy:
    """What other users of the machine can reach. `tests/ps/net/test_private_jobs.py` tries to."""

    @pytest.fixture
    def told(self, capsys: pytest.CaptureFixture[str], script: str) -> Callable[..., str]:
        def run(status: int, *arguments: str) -> str:
            assert status_of("--dry_run", *arguments, script) == status
            shown = capsys.readouterr()
            return shown.out + shown.err

        return run

    def test_a_job_on_this_machine_is_private(self, told: Callable[..., str]) -> None:
        assert told(0).startswith("private: sockets")
        assert told(0, "--servers", "127.0.0.1:7000*2", "--workers", "127.0.0.1:0*2").startswith("private: sockets")
        assert told(0, "--private", "ipc").startswith("private: sockets")
        assert told(0, "--private", "keys").startswith("private: keys")

    def test_plain_is_what_it_says_and_keys_of_the_user_are_used(
        self, told: Callable[..., str], tmp_path: Path
    ) -> None:
        assert told(0, "--plain").startswith("server 0: ")
        keygen(tmp_path / "keys")
        assert told(0, "--key_dir", str(tmp_path / "keys")).startswith("server 0: ")

    def test_contradictions_are_refused(
        self, told: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keygen(tmp_path / "keys")
        assert names(told(2, "--plain", "--private", "ipc"), "--private", "--plain")
        assert names(told(2, "--plain", "--key_dir", str(tmp_path / "keys")), "--plain", "--key_dir")
        for option in (("--plain",), ("--private", "ipc"), ("--log_max_bytes", "1MB")):
            assert option[0] in told(2, *option, "--nproc_per_node", "2")
            assert option[0] in told(2, *option, "--simulate")
        monkeypatch.setattr(roles, "own_addresses", lambda: {"192.0.2.7"})
        lists = ("--insecure", "--servers", "192.0.2.7:7000", "--workers", "192.0.2.7:0")
        assert "--plain" in told(2, "--plain", *lists)

    def test_a_size_of_logs_that_is_none_is_refused(self, capsys: pytest.CaptureFixture[str], script: str) -> None:
        assert status_of("--log_max_bytes", "many", script) == 2
        assert "--log_max_bytes" in capsys.readouterr().err

    def test_more_workers_than_a_machine_can_have_are_refused(self, told: Callable[..., str]) -> None:
        lists = ("--servers", "127.0.0.1:7000", "--workers", "127.0.0.1:0*99999999999")
        assert names(told(2, *lists), "--workers", "host:port")


class TestKeys:
    def test_keygen_makes_keys_that_only_their_owner_reads(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        folder = tmp_path / "keys"
        assert status_of("--keygen", str(folder)) == 0
        printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
        assert printed == sorted(folder.iterdir())
        assert len([path for path in printed if path.suffix == ".key_secret"]) == 4
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o077 == 0 for path in printed if path.suffix == ".key_secret")
        assert set(KeyFolder(folder).roles().values()) == set(Role)

    def test_keygen_never_overwrites(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "keys").mkdir()
        assert status_of("--keygen", str(tmp_path / "keys")) == 0  # an empty folder is fine
        before = {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
        assert status_of("--keygen", str(tmp_path / "keys")) == 2
        assert lines_naming(capsys.readouterr().err, tmp_path / "keys")
        assert {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == before
        (tmp_path / "file").write_text("")
        assert status_of("--keygen", str(tmp_path / "file")) == 2

    @pytest.fixture
    def outside(self, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
        """A server on an address that others can reach. Only ever used with --dry_run: nothing listens there."""
        monkeypatch.setattr(roles, "own_addresses", lambda: {"192.0.2.7"})
        return ("--dry_run", "--servers", "192.0.2.7:7000", "--workers", "192.0.2.7:0")

    def test_a_server_that_others_can_reach_needs_keys(
        self, capsys: pytest.CaptureFixture[str], script: str, outside: tuple[str, ...]
    ) -> None:
        assert status_of(*outside, script) == 2
        told = capsys.readouterr().err
        for part in ("server 0 at 192.0.2.7:7000", "--keygen", "--key_dir", "--insecure"):
            assert part in told

    def test_it_may_be_insecure_if_that_is_said(
        self, capsys: pytest.CaptureFixture[str], script: str, outside: tuple[str, ...]
    ) -> None:
        assert status_of("--insecure", *outside, script) == 0
        assert capsys.readouterr().out.count("FLEET_INSECURE=1") == 2

    @pytest.mark.parametrize("by", ["option", "environment"])
    def test_it_may_listen_with_keys(
        self,
        capsys: pytest.CaptureFixture[str],
        script: str,
        outside: tuple[str, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        by: str,
    ) -> None:
        status_of("--keygen", str(tmp_path / "keys"))
        monkeypatch.chdir(tmp_path)
        if by == "environment":
            monkeypatch.setenv("FLEET_KEY_DIR", "keys")
        assert status_of(*(("--key_dir", "keys") if by == "option" else ()), *outside, script) == 0
        assert capsys.readouterr().out.count(f"FLEET_KEY_DIR={tmp_path / 'keys'}\n") == 2

    def test_a_machine_with_workers_only_listens_to_nobody_and_needs_no_keys(
        self, script: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(roles, "own_addresses", lambda: {"192.0.2.8"})
        assert status_of("--dry_run", "--servers", "192.0.2.7:7000", "--workers", "192.0.2.8:0", script) == 0

    def test_a_folder_of_keys_that_is_not_there_is_named_before_anything_starts(
        self, capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
    ) -> None:
        assert status_of("--key_dir", str(tmp_path / "nowhere"), "--dry_run", script) == 2
        assert str(tmp_path / "nowhere") in capsys.readouterr().err


@pytest.mark.slow
def test_two_servers_and_two_workers_train_and_tell_what_they_do(tmp_path: Path) -> None:
    arguments = ("--server_num", "2", "--worker_num", "2", TINY, "--note", "all's well", "--steps", "3")
    with forked_fleetrun(tmp_path, *arguments, PSERVER_DEBUG="1") as job:
        assert job.wait(150) == 0
    logs = sorted(path.name for path in run_dir(tmp_path).iterdir())
    assert logs == ["history.jsonl", "serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]
    assert "[worker 0] worker 0 of 2 ends with loss" in job.output
    assert "[worker 1]" not in job.output
    for index in range(2):
        log = (tmp_path / "latest" / f"workerlog.{index}").read_text()
        assert f"worker {index} of 2 ends with loss" in log
        assert "all's well" in log
        _check_configuration(log, index)
        _check_tables(log)
    echoed = [line.removeprefix("[worker 0] ") for line in job.output.splitlines() if line.startswith("[worker 0]")]
    assert echoed == (tmp_path / "latest" / "workerlog.0").read_text().splitlines()
    told = [line for line in job.output.splitlines() if line.startswith("[fleetrun]")]
    assert names(told[-1], run_dir(tmp_path))  # what worker 0 has printed last may come behind it


def _cells(log: str, title: str) -> list[list[str]]:
    """The rows of the table under this title."""
    lines = log.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip() == title)
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("└"))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[start:end] if line.startswith("│")]


def _check_configuration(log: str, worker: int) -> None:
    """The effective settings are printed as a table at the start."""
    settings = {row[0]: row[1] for row in _cells(log, f"torchfleet worker {worker}")}
    assert names(settings["fleet"], "2 servers", "2 workers")
    assert settings["mode"] == "sync"
    assert settings["rpc_timeout"] == "30.0"
    assert settings["a_sync_configs.send_queue_size"] == "2"


def _check_tables(log: str) -> None:
    """PSERVER_DEBUG=1 shows which parameter goes to which table, and what each server holds."""
    dense, sparse = _cells(log, "plan")
    assert dense[:4] == ["dense.0", "dense", "3", "sgd(lr=0.1)"]
    assert dense[5:] == ["-", "linear.weight, linear.bias"]
    assert sparse[:5] == ["words", "sparse", "any id x 2", "sgd(lr=0.1)", "uniform(-0.05, 0.05)"]
    held = _cells(log, "servers")
    assert [(row[0][0], row[1], row[2]) for row in held] == [
        ("0", "dense.0", "dense"),
        ("0", "words", "sparse"),
        ("1", "dense.0", "dense"),
        ("1", "words", "sparse"),
    ]
    assert all("127.0.0.1:" in row[0] for row in held)


@pytest.mark.slow
def test_a_job_given_by_addresses_trains_with_keys(tmp_path: Path) -> None:
    assert status_of("--keygen", str(tmp_path / "keys")) == 0
    servers = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    arguments = ("--servers", servers, "--workers", "127.0.0.1:0", "--key_dir", str(tmp_path / "keys"))
    with forked_fleetrun(tmp_path / "log", *arguments, TINY, "--mode", "async") as job:
        assert job.wait(150) == 0
    assert lines_naming(job.output, "2 servers", "1 worker", "keys")
    assert "[worker 0] worker 0 of 1 ends with loss" in job.output
    names = sorted(path.name for path in run_dir(tmp_path / "log").iterdir())
    assert names == ["history.jsonl", "serverlog.0", "serverlog.1", "workerlog.0"]


class TestModulesAndVersions:
    def test_a_module_is_run_as_python_m_runs_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "__init__.py").touch()
        (tmp_path / "package" / "train.py").write_text(
            "import os, sys, time\nfrom . import __name__ as own\n"
            "print(own, sys.argv[1:], os.environ['FLEET_ROLE'], flush=True)\n"
            "if os.environ['FLEET_ROLE'] == 'WORKER':\n    open('done', 'w').close()\n"
            "while not os.path.exists('done'):\n    time.sleep(0.05)\n"  # a server that ends first ends the job
        )
        monkeypatch.chdir(tmp_path)
        arguments = ("--server_num", "1", "--worker_num", "1", "-m", "package.train", "--epochs", "3", "-m")
        with fleetrun(tmp_path / "log", *arguments, PYTHONPATH=str(ROOT)) as job:
            job.wait()
        assert "package ['--epochs', '3', '-m'] WORKER" in (run_dir(tmp_path / "log") / "workerlog.0").read_text()

    @pytest.mark.parametrize("name", ["no_such_package.train", "../train"])
    def test_a_module_that_is_not_there_is_named(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        before = list(sys.path)
        assert status_of("-m", name) == 2
        assert lines_naming(capsys.readouterr().err, "-m", name, f"'{name.partition('.')[0]}'")
        assert sys.path == before

    def test_a_script_behind_m_is_told_to_go_without(self, script: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert status_of("-m", script) == 2
        assert f"fleetrun {script}" in capsys.readouterr().err

    @pytest.mark.parametrize("command", [cli.main, fleet_command])
    def test_the_version_is_that_of_the_package(self, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            command(["--version"])
        assert left.value.code == 0
        assert capsys.readouterr().out.split()[1] == torchfleet.__version__ == version("torchfleet")
