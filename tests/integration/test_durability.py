"""Servers that keep a log are killed in the middle of training: nothing is lost, nothing is made twice."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from support.fleets import ForkedServer
from support.messages import lines_naming
from support.scripts.gates import close_gates, open_gate
from support.scripts.launching import forked_fleetrun, run_dir

from torchfleet.launch.roles import free_ports
from torchfleet.ps.net.sockets import SocketChannel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

SCRIPT = str(Path(__file__).parents[1] / "support" / "scripts" / "durable_job.py")
ROOT = str(Path(__file__).parents[2])
JOB = ("--server_num", "2", "--worker_num", "2", "--durability", "log", "--max_restart", "4")


def result(log_dir: Path, name: str, mode: str, kills: tuple[int, ...]) -> str:
    """What the job prints at its end, if these servers are killed on the way. The workers wait for each kill."""
    gates, folder = [30 + 30 * number for number in range(len(kills))], log_dir / "gates"
    close_gates(folder, *gates)
    arguments = (
        "--mode",
        mode,
        "--steps",
        "80",
        "--pause",
        "0.01",
        "--save",
        "25",
        "--save_to",
        str(log_dir / "model"),
        "--gates",
        str(folder),
    )
    with forked_fleetrun(log_dir, *JOB, SCRIPT, *arguments, PYTHONPATH=ROOT) as job:
        for number, server in enumerate(kills):
            job.wait_for(f"worker 0 has made step {10 + 30 * number}")
            os.kill(job.pid("SERVER", server), signal.SIGKILL)
            open_gate(folder, gates[number])
        assert job.wait() == 0, job.output
        assert len(lines_naming(job.output, "[fleetrun]", "SIGKILL")) == len(kills)
        found = re.search(rf"{name}: (\S+)", job.output)
    assert found
    assert not (run_dir(log_dir) / "server_state").exists()  # no job could go on from it
    return found[1]


def test_async_training_loses_and_doubles_no_step_when_servers_are_killed(tmp_path: Path) -> None:
    assert result(tmp_path, "steps counted", "async", (0, 1)) == "160"


@pytest.mark.slow
def test_sync_training_with_killed_servers_equals_the_undisturbed_run_bit_for_bit(tmp_path: Path) -> None:
    plain = result(tmp_path / "plain", "digest", "sync", ())
    assert result(tmp_path / "killed", "digest", "sync", (0, 1)) == plain


def test_a_server_that_is_killed_under_load_goes_on_under_its_identity(tmp_path: Path) -> None:
    """Two clients count up rows while it is killed twice: every answer that they got stands, and no more."""
    options = ("--durability", "log", "--log_store", str(tmp_path))
    spec = TableSpec("rows", dim=2, rule=Rule(lr=1.0), initializer=Initializer("constant", 0.0))
    server = ForkedServer(f"tcp://127.0.0.1:{free_ports(1)[0]}", *options)
    endpoint, num_pushes, keys = server.endpoint, [0, 0], np.arange(50, dtype=np.uint64)
    is_over = threading.Event()

    def push(number: int) -> None:
        channel = SocketChannel(endpoint, None, Role.FIRST_WORKER)
        with Client([channel], worker=number, patience=Patience(60.0, 3, 0.5)) as client:
            client.create_table(spec)
            while not is_over.is_set():
                client.push("rows", keys, np.ones((50, 2), np.float32)).result()
                num_pushes[number] += 1

    threads = [threading.Thread(target=push, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        for kill in range(2):
            _wait_for(num_pushes, sum(num_pushes) + 30)
            server.kill()
            server.close()
            server = ForkedServer(endpoint, *options)
            _wait_for(num_pushes, sum(num_pushes) + 30 * (kill + 1))
        is_over.set()
        for thread in threads:
            thread.join(60)
        with Client([SocketChannel(endpoint)]) as client:
            client.attach(spec)
            rows = client.pull("rows", keys, create=False).result()
        assert np.array_equal(rows, np.full((50, 2), -float(sum(num_pushes)), np.float32))
    finally:
        is_over.set()
        server.close()


@pytest.mark.slow
def test_a_killed_fleetrun_is_started_again_with_the_rows_of_its_log(tmp_path: Path) -> None:
    job = (*JOB, "--log_store", str(tmp_path / "store"), SCRIPT, "--mode", "async", "--pause", "0.01", "--steps")
    with forked_fleetrun(tmp_path / "killed", *job, "40000", PYTHONPATH=ROOT) as killed:
        killed.wait_for("worker 0 has made step 30")
        killed.process.kill()
        assert not killed.left(30.0)
    with forked_fleetrun(tmp_path / "again", *job, "20", PYTHONPATH=ROOT) as again:
        assert again.wait() == 0, again.output
        found = re.search(r"steps counted: (\S+)", again.output)
    assert found
    assert 2 * 20 < float(found[1]) < 2 * (20 + 40_000)
    assert not list((tmp_path / "store").glob("*/segment*"))  # this job has ended


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_server_on_a_full_disk_answers_when_there_is_room_and_loses_nothing(tmp_path: Path) -> None:
    spec = TableSpec("rows", dim=2, rule=Rule(lr=1.0), initializer=Initializer("constant", 0.0))
    keys, num_pushes, disk = np.arange(500, dtype=np.uint64), [0], tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount a disk")
    options = ("--durability", "log", "--log_store", str(disk / "log"))
    server, is_over = ForkedServer("tcp://127.0.0.1:0", *options), threading.Event()

    def push() -> None:
        with Client([SocketChannel(server.endpoint)], patience=Patience(60.0, 3, 0.5)) as client:
            client.create_table(spec)
            while not is_over.is_set():
                client.push("rows", keys, np.ones((500, 2), np.float32)).result()
                num_pushes[0] += 1
                is_over.wait(0.05)

    thread = threading.Thread(target=push)
    try:
        thread.start()
        _wait_for(num_pushes, 2)
        _fill(disk / "other")
        before = -1
        while num_pushes[0] != before:  # until no push is answered for a second
            before = num_pushes[0]
            is_over.wait(1.0)
        (disk / "other").unlink()
        _wait_for(num_pushes, before + 2)
        is_over.set()
        thread.join(60)
        server.kill()
        server.close()
        server = ForkedServer("tcp://127.0.0.1:0", *options)
        with Client([SocketChannel(server.endpoint)]) as client:
            client.attach(spec)
            rows = client.pull("rows", keys, create=False).result()
        assert np.array_equal(rows, np.full((500, 2), -float(num_pushes[0]), np.float32))
    finally:
        is_over.set()
        server.close()
        thread.join(60)
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _wait_for(counts: list[int], least: int) -> None:
    event = threading.Event()
    for _ in range(6000):
        if sum(counts) >= least:
            return
        event.wait(0.01)
    raise AssertionError(f"{sum(counts)} pushes after a minute, expected {least}")
