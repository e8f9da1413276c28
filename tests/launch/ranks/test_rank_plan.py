"""fleetrun for collective jobs: its command line, the environment of the ranks, and what happens when they fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.messages import lines_naming, names, naming
from support.paths import SCRIPTS
from support.scripts.launching import (
    SOON,
    START,
    Forked,
    Started,
    fleetrun,
    forked_fleetrun,
    in_log,
    run_dir,
    wait_until,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from torchfleet.base import cgroups
from torchfleet.base.errors import RoleError
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.launch import cli, roles
from torchfleet.launch.ranks import rendezvous, stores
from torchfleet.launch.ranks.rendezvous import FixedRendezvous, RankStoreLost
from torchfleet.launch.ranks.stores import StoreAddress, reach, serve
from torchfleet.launch.roles import free_ports

PLAY = str(SCRIPTS / "ranks_play.py")
TWO = ("--nproc_per_node", "2")
MASTER = ("--master", "127.0.0.1:7000")


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEET_KEY_DIR", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "POD_IP"):
        monkeypatch.delenv(name, raising=False)


def status_of(*arguments: str) -> int:
    """What fleetrun returns, in this process. argparse leaves by SystemExit."""
    try:
        return cli.main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


class TestRefusedCommandLines:
    @pytest.mark.parametrize(
        ("arguments", "messages"),
        [
            (("--nproc_per_node", "0"), ("--nproc_per_node must be at least 1, found 0",)),
            (("--nproc_per_node", "two"), ("invalid int value: 'two'",)),
            (("--gpus", "0,x"), ("--gpus expects numbers", "found 'x'")),
            (("--gpus", "1,1"), ("--gpus", "twice", "'1,1'")),
            (("--gpus", ","), ("--gpus lists nothing, found ','",)),
            (("--gpus", "0,1", "--nproc_per_node", "3"), ("--nproc_per_node 3 and --gpus 0,1 differ",)),
            (("--nnodes", "many"), ("--nnodes expects a number of machines or MIN:MAX, found 'many'",)),
            (("--nnodes", "1:2:3"), ("found '1:2:3'",)),
            (("--nnodes", "0"), ("--nnodes must be at least 1", "found '0'")),
            (("--nnodes", "3:2", *MASTER), ("MIN not more than MAX", "found '3:2'")),
            (("--nnodes", "2", "--rank", "0"), ("--nnodes", "needs --master host:port")),
            (("--nnodes", "2", *MASTER), ("--nnodes 2 needs --rank",)),
            (("--nnodes", "2", *MASTER, "--rank", "2"), ("--rank must be", "0 to 1; found 2")),
            (("--nnodes", "1:2", *MASTER, "--rank", "0"), ("--rank 0 and --nnodes 1:2",)),
            ((*TWO, "--master", "here"), ("--master expects host:port, found 'here'",)),
            ((*TWO, "--master", "127.0.0.1:0"), ("--master expects host:port, found '127.0.0.1:0'",)),
            (("--ips", "127.0.0.1,192.0.2.1", "--nnodes", "3"), ("--ips lists 2 machines, --nnodes says 3",)),
            (("--ips", "192.0.2.1,192.0.2.2", "--insecure"), ("--ips 192.0.2.1,192.0.2.2", "found none of them")),
            ((*TWO, "--max_restart", "-1"), ("--max_restart must be at least 0, found -1",)),
            ((*TWO, "--key_dir", "keys"), ("--key_dir", "--nproc_per_node", "has no keys")),
        ],
    )
    def test_a_wrong_value_is_refused_with_what_was_expected_and_found(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], messages: tuple[str, ...]
    ) -> None:
        assert status_of("--dry_run", *arguments, PLAY) == 2
        told = capsys.readouterr().err
        for message in messages:
            assert message in told

    @pytest.mark.parametrize(
        "other",
        [("--server_num", "0"), ("--worker_num", "2"), ("--servers", "127.0.0.1:1"), ("--max_job_restart", "1")],
    )
    @pytest.mark.parametrize("own", [TWO, ("--gpus", "0"), ("--nnodes", "1"), ("--rank", "0"), ("--ips", "127.0.0.1")])
    def test_options_of_both_kinds_of_jobs_are_both_named(
        self, capsys: pytest.CaptureFixture[str], own: tuple[str, ...], other: tuple[str, ...]
    ) -> None:
        assert status_of("--dry_run", *own, *other, PLAY) == 2
        told = capsys.readouterr().err
        assert own[0] in told
        assert other[0] in told

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--nnodes", "2", "--master", "192.0.2.1:7000", "--rank", "0"),
            ("--nnodes", "1:2", "--master", "192.0.2.1:7000"),
            ("--ips", "192.0.2.1,127.0.0.1"),
        ],
    )
    def test_machines_that_meet_over_a_network_need_the_word_insecure(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
    ) -> None:
        assert status_of("--dry_run", *TWO, *arguments, PLAY) == 2
        told = capsys.readouterr().err
        assert "--insecure" in told
        assert status_of("--dry_run", *TWO, *arguments, "--insecure", PLAY) == 0

    def test_a_gpu_that_is_hidden_is_refused_with_both_names(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
        assert status_of("--dry_run", "--gpus", "3,1", PLAY) == 2
        assert names(capsys.readouterr().err, "--gpus", "GPU 1", "CUDA_VISIBLE_DEVICES=2,3")


class TestNamedGpus:
    @pytest.mark.parametrize(
        ("num", "gpus", "message"),
        [
            (0, "0,1", "--gpus names GPU 0, but torch finds no GPU on this machine"),
            (2, "1,2", "--gpus names GPU 2, but torch finds 2 GPUs on this machine"),
        ],
    )
    def test_one_that_the_machine_does_not_have_is_an_error_before_anything_starts(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        num: int,
        gpus: str,
        message: str,
    ) -> None:
        monkeypatch.delenv("FLEET_DEVICE", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
        assert status_of("--log_dir", str(tmp_path / "log"), "--gpus", gpus, PLAY) == 2
        told = capsys.readouterr().err
        assert message in told
        assert "FLEET_DEVICE=cpu fleetrun --nproc_per_node N" in told
        assert not (tmp_path / "log").exists()

    def test_a_job_that_is_kept_off_the_gpus_cannot_name_any(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FLEET_DEVICE", "cpu")
        assert status_of("--gpus", "0", PLAY) == 2
        assert names(capsys.readouterr().err, "--gpus 0", "FLEET_DEVICE=cpu")


class TestDryRun:
    @pytest.fixture
    def planned(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., dict[str, dict[str, str]]]:
        """The environment of every rank, by the name that the plan gives the rank."""

        def plan(*arguments: str) -> dict[str, dict[str, str]]:
            assert status_of("--dry_run", "--log_dir", str(tmp_path / "log"), *arguments, PLAY, "-x") == 0
            assert not (tmp_path / "log").exists()
            blocks = re.split(r"^(?=\S)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
            found = {}
            for block in blocks:
                head, *lines = block.splitlines()
                assert f"{PLAY} -x" in head
                found[head.partition(":")[0]] = dict(line.strip().split("=", 1) for line in lines)
            return found

        return plan

    def test_one_machine(self, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setattr(cgroups, "cpu_limit", lambda: 6.5)  # of a container on a machine with 8 cores
        found = planned(*TWO)
        assert list(found) == ["rank 0", "rank 1"]
        assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in found.values()] == [
            ("0", "0", "2"),
            ("1", "1", "2"),
        ]
        for env in found.values():
            assert env["OMP_NUM_THREADS"] == "3"
            assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "lo"
            assert "CUDA_VISIBLE_DEVICES" not in env

    def test_what_the_user_has_set_stays(self, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
        env = planned("--nproc_per_node", "1")["rank 0"]
        assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"]) == ("7", "eth1")

    def test_named_gpus_are_dealt_out_in_their_order(self, planned: Any) -> None:
        found = planned("--gpus", "3,1")
        assert [(env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) for env in found.values()] == [
            ("0", "3,1"),
            ("1", "3,1"),
        ]

    def test_the_second_of_three_machines_has_the_ranks_that_follow_the_first(self, planned: Any) -> None:
        found = planned(*TWO, "--nnodes", "3", "--master", "192.0.2.1:7000", "--rank", "1", "--insecure")
        assert list(found) == ["rank 2", "rank 3"]
        assert [env["WORLD_SIZE"] for env in found.values()] == ["6", "6"]
        assert found["rank 2"]["MASTER_ADDR"] == "192.0.2.1"
        assert "GLOO_SOCKET_IFNAME" not in found["rank 2"]

    def test_the_own_place_in_a_list_of_machines_is_found(self, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(roles, "own_addresses", lambda: {"192.0.2.2"})
        found = planned(*TWO, "--ips", "192.0.2.1,192.0.2.2", "--insecure")
        assert list(found) == ["rank 2", "rank 3"]
        assert found["rank 2"]["MASTER_ADDR"] == "192.0.2.1"

    def test_machines_that_come_and_go_have_no_ranks_yet(self, planned: Any) -> None:
        found = planned(*TWO, "--nnodes", "1:4", *MASTER)
        assert list(found) == ["local rank 0", "local rank 1"]
        assert "RANK" not in found["local rank 0"]


def listening(pid: int | None = None) -> list[Any]:
    return [bound for bound in psutil.Process(pid).net_connections() if bound.status == psutil.CONN_LISTEN]


Pair = tuple[FixedRendezvous, FixedRendezvous]


class TestRendezvous:
    @pytest.fixture
    def pair(self) -> Pair:
        """The launchers of two machines."""
        place = StoreAddress("127.0.0.1", free_ports(1)[0])
        return FixedRendezvous(place, 0, 2, print), FixedRendezvous(place, 1, 2, print)

    def test_a_store_on_loopback_listens_to_this_machine_only(self) -> None:
        store = serve(StoreAddress("127.0.0.1", 0))
        assert [bound.laddr.ip for bound in listening() if bound.laddr.port == store.port] == ["127.0.0.1"]

    def test_a_port_that_is_taken_is_named(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(RoleError, match=naming(f"127.0.0.1:{port}", "--master")):
                serve(StoreAddress("127.0.0.1", port))

    def test_a_machine_that_comes_back_makes_all_start_again_with_a_new_store(self, pair: Pair) -> None:
        first, other = pair
        starts = [together(first, other)]
        assert first.num_nodes_waiting() == 0
        again = FixedRendezvous(first.address, 1, 2, print)  # a launcher that was started anew
        starts.append(together(again, first, lambda: wait_until(first.num_nodes_waiting, SOON, "machine that waits")))
        assert starts[0] != starts[1]
        assert first.num_starts == again.num_starts == 1
        assert first.num_nodes_waiting() == again.num_nodes_waiting() == 0

    def test_the_end_of_a_job_on_one_machine_is_heard_on_the_other(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rendezvous, "_PARTING", 0.0)
        together(*pair)
        for ending, other in (pair, pair[::-1]):
            ending.end("rank 7 is gone")
            with pytest.raises(RendezvousClosedError, match=naming("rank 7")):
                other.num_nodes_waiting()

    def test_a_store_that_has_gone_is_named(self, pair: Pair) -> None:
        together(*pair)
        first, other = pair
        place = first.address
        first._store = first._start_store = first._rank_store = None  # type: ignore[assignment]  # its launcher was killed
        with pytest.raises(RendezvousConnectionError, match=str(place)):
            other.num_nodes_waiting()

    def test_a_lost_store_of_the_ranks_is_not_waited_for_again(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rendezvous, "_RANK_STORE", 0.0)
        together(*pair)
        other = pair[1]
        place, gone = other._rank_address, StoreAddress("127.0.0.1", free_ports(1)[0])
        for address in (gone, place):  # the second one answers
            other._rank_address = address
            with pytest.raises(RankStoreLost, match=str(gone)), other.rank_attempts(2):
                pass
        together(*pair)
        with other.rank_attempts(2) as attempts:
            assert attempts.number == 0

    def test_a_store_that_goes_while_it_is_reached_is_waited_for_no_longer_than_asked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stores, "_CONNECTION", timedelta(seconds=0.5))
        reports: list[str] = []
        place = StoreAddress("127.0.0.1", free_ports(1)[0])
        listening = socket.create_server(place)
        thread = threading.Thread(target=accept_and_leave, args=(listening, 2), daemon=True)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(RoleError, match=str(place)):
            reach(place, reports.append, patience=0.0)
        assert time.monotonic() - begun < SOON
        assert [str(place) in line for line in reports] == [True]


def accept_and_leave(listening: socket.socket, num_connections: int) -> None:
    """Close each connection, and then stop listening, as a process does that is killed."""
    with listening:
        for _ in range(num_connections):
            listening.accept()[0].close()


def together(first: FixedRendezvous, other: FixedRendezvous, before: Callable[[], None] = lambda: None) -> int:
    """Both join the next start; the port of the ranks' store. `before`: what happens before the other does."""
    joined: list[Any] = []
    thread = threading.Thread(target=lambda: joined.append(first.next_rendezvous()), daemon=True)
    thread.start()
    before()
    joined.append(other.next_rendezvous())
    thread.join(10)
    joined.sort(key=lambda info: info.rank)
    assert [(info.rank, info.world_size) for info in joined] == [(0, 2), (1, 2)]
    assert joined[0].bootstrap_store_info == joined[1].bootstrap_store_info
    return int(joined[0].bootstrap_store_info.master_port)


def environments(log_dir: Path, num: int) -> list[dict[str, str]]:
    """The environments that the ranks printed."""
    logs = [(log_dir / "latest" / f"workerlog.{rank}").read_text() for rank in range(num)]
    return [json.loads(next(line for line in log.splitlines() if line.startswith("{"))) for log in logs]


def echoed(job: Started) -> list[str]:
    """What fleetrun has shown of rank 0's output."""
    return [line.removeprefix("[rank 0] ") for line in job.output.splitlines() if line.startswith("[rank 0] ")]


def rank_pid(job: Started, rank: int) -> int:
    for process in job.running():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank) and PLAY in process.cmdline():
                return int(process.pid)
    raise AssertionError(f"no rank {rank} is running")


class TestOneMachine:
    def test_ranks_find_each_other_and_tell_what_they_do(self, tmp_path: Path) -> None:
        around = {"TRAINING_ROLE": "PSERVER", "PADDLE_TRAINER_ID": "5", "FLEET_ROLE": "SERVER", "RANK": "9",
                  "FLEET_SERVER_ENDPOINTS": "127.0.0.1:1", "WORLD_SIZE": "10"}  # fmt: skip
        actions = ("environment", "sum", "status", "a $$ sign", "1@line")
        with forked_fleetrun(tmp_path, *TWO, PLAY, *actions, **around) as job:
            assert job.wait() == 0
        found = environments(tmp_path, 2)
        assert [(env["RANK"], env["LOCAL_RANK"]) for env in found] == [("0", "0"), ("1", "1")]
        for env in found:
            assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
            assert env["MASTER_ADDR"] == "127.0.0.1"
            assert env["GLOO_SOCKET_IFNAME"] == "lo"
            assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
            assert not env.keys() & set(around) - {"RANK", "WORLD_SIZE"}
            info = PaddleCloudRoleMaker(is_collective=True, environment=env).read()
            assert (info.worker_index, info.num_workers, info.local_rank) == (
                int(env["RANK"]),
                2,
                int(env["RANK"]),
            )
        assert "[rank 0] sum [1, 2]" in job.output
        assert "[rank 0] a $$ sign" in job.output
        assert "[rank 1]" not in job.output
        assert re.search(r"\[fleetrun\] 2,800 samples\b.*loss 0.2500", job.output)
        assert names(job.output.splitlines()[-1], "[fleetrun]", run_dir(tmp_path))
        assert echoed(job) == (tmp_path / "latest" / "workerlog.0").read_text().splitlines()
        assert sorted(path.name for path in run_dir(tmp_path).iterdir()) == [
            "history.jsonl",
            "workerlog.0",
            "workerlog.1",
        ]

    def test_a_rank_that_fails_ends_the_job_and_is_quoted(self, tmp_path: Path) -> None:
        lines = [f"1@line:{i}" for i in range(30)]
        with fleetrun(tmp_path, *TWO, PLAY, "0@deaf", "0@child", *lines, "1@exit:7", "sleep") as job:
            wait_until(in_log(tmp_path / "latest" / "workerlog.1", "exit 7"), START, "failure")
            assert job.wait(SOON) == 1
            assert job.left(grace=SOON) == []
        log = run_dir(tmp_path) / "workerlog.1"
        assert lines_naming(job.output, "[fleetrun]", "rank 1", "status 7", log)
        quoted = [line.strip() for line in job.output.splitlines() if line.startswith("    ")]
        assert quoted == [*(f"line {i}" for i in range(11, 30)), "exit 7"]

    def test_a_killed_rank_makes_all_start_again_and_go_on_from_what_they_saved(self, tmp_path: Path) -> None:
        (tmp_path / "die").touch()
        with forked_fleetrun(tmp_path / "log", *TWO, "--max_restart", "3", PLAY, f"count:{tmp_path}") as job:
            assert job.wait() == 0
        assert lines_naming(job.output, "[fleetrun]", "rank 1", "SIGKILL", "1 of 3")
        assert "2 of 3" not in job.output
        for rank in range(2):
            log = (tmp_path / "log" / "latest" / f"workerlog.{rank}").read_text()
            assert re.findall(r"begins at step (\d+) with 2 ranks", log) == ["0", "10"]
            assert "ends with 40 after 20 steps" in log  # as without any failure: two a step

    def test_restarts_are_counted_and_the_log_keeps_every_run(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, *TWO, "--max_restart", "2", PLAY, "environment", "1@signal:40", "sleep") as job:
            assert job.wait() == 1
        for number in (1, 2):
            assert lines_naming(job.output, "rank 1", "signal 40", f"{number} of 2")
        assert lines_naming(job.output, "rank 1", "signal 40")
        log = (tmp_path / "latest" / "workerlog.1").read_text()
        assert re.findall(r'"TORCHELASTIC_RESTART_COUNT": "(\d)"', log) == ["0", "1", "2"]
        assert echoed(job) == (tmp_path / "latest" / "workerlog.0").read_text().splitlines()  # each run is shown once

    def test_ctrl_c_ends_everything(self, tmp_path: Path) -> None:
        with fleetrun(tmp_path, *TWO, PLAY, "child", "sleep") as job:
            for rank in range(2):
                wait_until(in_log(tmp_path / "latest" / f"workerlog.{rank}", "sleep"), START, f"rank {rank}")
            assert {bound.laddr.ip for bound in listening(job.process.pid)} == {"127.0.0.1"}
            for _ in range(2):  # an impatient user
                os.kill(job.process.pid, signal.SIGINT)
            assert job.wait(SOON) == 130
            assert job.left(grace=SOON) == []
        assert lines_naming(job.output, "[fleetrun]", "SIGINT")
        assert "Traceback" not in job.output

    def test_ranks_end_with_a_launcher_that_was_killed(self, tmp_path: Path) -> None:
        with fleetrun(tmp_path, *TWO, "--max_restart", "1", PLAY, "1@deaf", "sleep") as job:
            for rank in range(2):
                wait_until(in_log(tmp_path / "latest" / f"workerlog.{rank}", "sleep"), START, f"rank {rank}")
            assert rank_pid(job, 0) != rank_pid(job, 1)
            os.kill(job.process.pid, signal.SIGKILL)
            assert job.wait(SOON) == -signal.SIGKILL
            assert job.left(grace=SOON) == []


def machine(log_dir: Path, number: int, port: int, *arguments: str) -> Started:
    options = ("--nproc_per_node", "1", "--nnodes", "2", "--master", f"127.0.0.1:{port}", "--rank", str(number))
    return forked_fleetrun(log_dir / str(number), *options, *arguments)


class TestTwoMachines:
    def test_their_ranks_are_one_job(self, tmp_path: Path) -> None:
        port = free_ports(1)[0]
        with machine(tmp_path, 1, port, PLAY, "sum") as second, machine(tmp_path, 0, port, PLAY, "sum") as first:
            assert (first.wait(), second.wait()) == (0, 0)
        assert "[rank 0] sum [1, 2]" in first.output
        assert "[rank 1] sum [1, 2]" in second.output
        assert (tmp_path / "1" / "latest" / "workerlog.1").exists()

    def test_a_rank_that_fails_on_one_ends_the_job_on_both(self, tmp_path: Path) -> None:
        go = tmp_path / "go"
        port, actions = free_ports(1)[0], (PLAY, f"0@wait:{go}", "0@exit:5", "sleep")
        with machine(tmp_path, 0, port, *actions) as first, machine(tmp_path, 1, port, *actions) as second:
            wait_until(in_log(tmp_path / "1" / "latest" / "workerlog.1", "sleep"), START, "rank 1")
            go.touch()
            assert (first.wait(), second.wait()) == (1, 1)
        assert lines_naming(first.output, "rank 0", "status 5")
        assert lines_naming(second.output, "machine 0", "rank 0", "status 5")

    def test_a_machine_that_waits_for_another_can_be_stopped(self, tmp_path: Path) -> None:
        with machine(tmp_path, 0, free_ports(1)[0], PLAY, "sum") as job:
            job.wait_for("2 machines")
            os.kill(job.process.pid, signal.SIGTERM)
            assert job.wait(SOON) == 143

    @pytest.mark.slow
    def test_a_killed_rank_makes_both_start_again(self, tmp_path: Path) -> None:
        (tmp_path / "die").touch()
        port, actions = free_ports(1)[0], ("--max_restart", "1", PLAY, f"count:{tmp_path}")
        with machine(tmp_path, 0, port, *actions) as first, machine(tmp_path, 1, port, *actions) as second:
            assert (first.wait(), second.wait()) == (0, 0)
        assert lines_naming(second.output, "rank 1", "SIGKILL", "1 of 1")
        for rank in range(2):
            log = (tmp_path / str(rank) / "latest" / f"workerlog.{rank}").read_text()
            assert re.findall(r"begins at step (\d+) with 2 ranks", log) == ["0", "10"]
            assert "ends with 40 after 20 steps" in log


@pytest.mark.slow
@pytest.mark.parametrize(("own", "other"), [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
def test_machines_may_come_and_go_between_the_bounds(tmp_path: Path, own: str, other: str) -> None:
    """The machine that goes has number 1, or number 0 and with it the store of the ranks."""
    (tmp_path / "more").touch()
    place = f"127.0.0.1:{free_ports(1)[0]}"
    options = ("--nproc_per_node", "1", "--nnodes", "1:2", "--master", place, "--max_restart", "1")

    def machine_at(host: str) -> Started:
        launcher = (sys.executable, str(SCRIPTS / "launcher_at.py"), host, "--log_dir", str(tmp_path / host))
        return Forked((*launcher, *options, PLAY, f"count:{tmp_path}"))

    with machine_at(own) as stays:
        stays.wait_for("begins at step 0 with 1 ranks")
        with machine_at(other) as goes:
            stays.wait_for("with 2 ranks")
            goes.wait_for("with 2 ranks")
            num_alone = stays.output.count("with 1 ranks")
            os.kill(goes.process.pid, signal.SIGKILL)
        wait_until(lambda: stays.output.count("with 1 ranks") > num_alone, START, "start without the other machine")
        (tmp_path / "more").unlink()
        assert stays.wait() == 0
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", stays.output)]
    assert len(begun) >= 3  # torch may meet once more, when it counts out the machine that it had missed first
    assert begun == sorted(begun)
    assert lines_naming(stays.output, "[fleetrun]", "machine")
    assert lines_naming(stays.output, "[fleetrun]", "1 of 1")  # it left without a word; coming costs no restart
