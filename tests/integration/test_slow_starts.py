"""Workers that are slow to come back after their restart, as processes: the servers wait for them, with all rows."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from support.messages import lines_naming
from support.scripts.launching import START, Started, forked_fleetrun, run_dir, wait_until

from torchfleet.ps.server.meeting.presence import RESTART_TIMEOUTS

SCRIPT = str(Path(__file__).parents[1] / "support" / "scripts" / "slow_restart.py")
LEASE = 2.0
FLAGS = {"none": (), "replicas": ("--replicas", "2"), "both": ("--replicas", "2", "--durability", "log")}


def start(folder: Path, *options: str) -> Started:
    folder.mkdir()
    job = ("--server_num", "1", "--worker_num", "1", "--max_restart", "3", *options, SCRIPT, str(folder / "gate"))
    return forked_fleetrun(folder, *job, FLEET_WORKER_TIMEOUT=str(LEASE))


def server_logs(folder: Path) -> list[str]:
    return [log.read_text() for log in sorted(run_dir(folder).glob("serverlog.*"))]


def assert_all_steps_are_there(job: Started) -> None:
    assert job.wait() == 0, job.output
    assert lines_naming(job.output, "steps counted: 20")


@pytest.mark.slow
def test_servers_wait_for_a_worker_that_its_launcher_is_starting(tmp_path: Path) -> None:
    """Three jobs at the same time, since each waits for longer than servers wait for a worker that nobody starts."""
    with contextlib.ExitStack() as stack:
        jobs = {kind: stack.enter_context(start(tmp_path / kind, *flags)) for kind, flags in FLAGS.items()}
        for job in jobs.values():
            job.wait_for("worker 0 ended with 1")
        time.sleep((RESTART_TIMEOUTS + 2) * LEASE)
        for kind, job in jobs.items():
            assert job.process.poll() is None, job.output
            assert not any("stopped" in log for log in server_logs(tmp_path / kind)), job.output
            (tmp_path / kind / "gate").touch()
        for job in jobs.values():
            assert_all_steps_are_there(job)


@pytest.mark.slow
def test_servers_that_nobody_told_end_as_deserted_and_go_on_from_their_logs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with start(tmp_path / "job", *FLAGS["both"], "--log_store", str(store)) as job:
        job.wait_for("worker 0 ended with 1")
        servers = {job.pid("SERVER", 0, replica) for replica in range(2)}
        os.kill(job.process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: not servers & {process.pid for process in job.running()}, START, "end of both servers")
            assert len(list(store.glob("*/start"))) == 2
        finally:
            os.kill(job.process.pid, signal.SIGCONT)
        wait_until(lambda: all("workers are lost" in log for log in server_logs(tmp_path / "job")), START, "reason")
        assert not any("have left" in log for log in server_logs(tmp_path / "job"))
        (tmp_path / "job" / "gate").touch()
        assert_all_steps_are_there(job)
    assert lines_naming(job.output, "[fleetrun]", "server 0", "status 1")
    assert not list(store.glob("*/start")), "the job is over"
