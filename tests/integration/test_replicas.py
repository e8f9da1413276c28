"""Servers with a backup each, as processes: killed, stopped and woken under load. Nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import processes
from support.messages import lines_naming
from support.own_etcd import started_etcd
from support.scripts.launching import START, Started, forked_fleetrun, in_log, run_dir, wait_until

from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.coordination.view import ENDED, View

COUNTED = str(Path(__file__).parents[1] / "support" / "scripts" / "counted.py")


class Job:
    """A fleet with one server and its backup, and what its logs say."""

    def __init__(self, log_dir: Path, mode: str, *options: str) -> None:
        self._log_dir, self._end = log_dir, log_dir / "end"
        flags = ("--server_num", "1", "--worker_num", "2", "--replicas", "2", *options)
        script = (COUNTED, "--mode", mode, "--steps", "1000000", "--until", str(self._end))
        self.started: Started = forked_fleetrun(log_dir, *flags, *script)

    def wait_for_steps(self, num: int) -> None:
        """Wait until worker 0 has made this many more steps, in twenties."""
        before = self._num_steps()
        wait_until(lambda: self._num_steps() >= before + num, START, "steps")

    def wait_for_backup(self, num: int) -> None:
        """Until a backup was named so often, and there is one now: a busy one may have been given up in between."""
        wait_until(lambda: self._said(" is the backup now") >= num, START, "backup that is in step")
        self.primary()

    def primary(self) -> int:
        """The replica that is primary now, as soon as the other one is its backup."""
        found: list[int] = []

        def is_found() -> bool:
            found[:] = [replica for replica in range(2) if self._is_primary_with_backup(replica)]
            return bool(found)

        wait_until(is_found, START, "primary with a backup")
        return found[0]

    def pid(self, replica: int) -> int:
        for process in self.started.running():
            with contextlib.suppress(psutil.Error):
                found = processes.environment_of(process)
                if found.get("FLEET_ROLE") == "SERVER" and found.get("FLEET_REPLICA", "0") == str(replica):
                    return int(process.pid)
        raise AssertionError(f"no replica {replica} is running")

    def log(self, replica: int) -> Path:
        return run_dir(self._log_dir) / f"serverlog.0{'.replica1' if replica else ''}"

    def finish(self) -> tuple[float, str]:
        """The longest step of worker 0, and its last lines."""
        self._end.touch()
        assert self.started.wait() == 0, self.started.output
        text = (run_dir(self._log_dir) / "workerlog.0").read_text()
        found = re.search(r"longest step ([0-9.]+) s", text)
        assert found
        return float(found[1]), text

    def _is_primary_with_backup(self, replica: int) -> bool:
        own, other = self._status(replica), self._status(1 - replica)
        is_primary = own.get("has_backup") and not own["backup"] and not own["deposed"]
        if is_primary and other.get("backup") and other["in_step"] and other["term"] == own["term"]:
            with contextlib.suppress(AssertionError):  # the status of one that was killed is still there
                return [own["pid"], other["pid"]] == [self.pid(replica), self.pid(1 - replica)]
        return False

    def _status(self, replica: int) -> dict[str, Any]:
        path = run_dir(self._log_dir) / f".status.server.0{'.replica1' if replica else ''}"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _num_steps(self) -> int:
        log = run_dir(self._log_dir) / "workerlog.0"
        found = re.findall(r"^step (\d+)$", log.read_text(), re.M) if log.exists() else []
        return int(found[-1]) if found else 0

    def _said(self, text: str) -> int:
        return sum(self.log(i).read_text().count(text) for i in range(2) if self.log(i).exists())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_killed_primary_is_replaced_and_nothing_is_lost_or_doubled(tmp_path: Path, mode: str) -> None:
    job = Job(tmp_path, mode)
    with job.started:
        job.wait_for_backup(1)
        job.wait_for_steps(20)
        for kill in range(2):  # the second time it is the one that took over
            os.kill(job.pid(job.primary()), signal.SIGKILL)
            job.wait_for_steps(20)
            job.wait_for_backup(2 + kill)
            job.wait_for_steps(20)
        longest, text = job.finish()
        assert " 0 numbers are wrong" in text
        # This is no measurement: without a take-over the step would fail after rpc_timeout, which is 30 seconds.
        assert longest < 20, "a step waits for the backup to take over"


@pytest.mark.slow
def test_a_stopped_primary_wakes_up_and_acknowledges_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, "async")
    with job.started:
        job.wait_for_backup(1)
        job.wait_for_steps(20)
        first = job.primary()
        stopped = job.pid(first)
        os.kill(stopped, signal.SIGSTOP)
        job.wait_for_steps(40)  # of the backup, which has taken over
        os.kill(stopped, signal.SIGCONT)
        wait_until(in_log(job.log(first), "another replica has taken over"), START, "end of the old primary")
        job.wait_for_backup(2)
        os.kill(job.pid(job.primary()), signal.SIGKILL)
        job.wait_for_steps(20)
        _, text = job.finish()
        assert " 0 numbers are wrong" in text


@pytest.mark.slow
def test_training_goes_on_without_a_backup_and_a_new_one_is_filled(tmp_path: Path) -> None:
    job = Job(tmp_path, "sync")
    with job.started:
        job.wait_for_backup(1)
        job.wait_for_steps(20)
        os.kill(job.pid(1 - job.primary()), signal.SIGKILL)
        job.wait_for_steps(20)
        job.wait_for_backup(2)
        _, text = job.finish()
        assert " 0 numbers are wrong" in text


@pytest.mark.slow
def test_seconds_without_a_backup_are_shown_and_counted(tmp_path: Path) -> None:
    job = Job(tmp_path, "async")
    with job.started:
        job.wait_for_backup(1)
        job.wait_for_steps(20)
        stopped = job.pid(1 - job.primary())
        shown = "server 0 without a backup for"
        before = job.started.output.count(shown)
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_until(lambda: job.started.output.count(shown) > before, START, "warning of a missing backup")
        finally:
            os.kill(stopped, signal.SIGCONT)
        job.wait_for_backup(2)
        job.finish()
        (told,) = lines_naming(job.started.output, "server 0", "was without a backup")
        found = re.search(r"\((\d+) times?\)$", told)
        assert found
        # Once at the start, if workers join before the first backup is in step, and as often as a replica was alone.
        assert 1 <= int(found[1]) <= 1 + job._said("goes on alone") + job._said("takes over as primary")


@pytest.mark.slow
def test_etcd_decides_in_the_place_of_fleetrun(tmp_path: Path) -> None:
    with started_etcd() as place:
        job = Job(tmp_path, "async", "--coordinator", f"etcd://{place}/{tmp_path.name}")
        with job.started:
            job.wait_for_backup(1)
            job.wait_for_steps(20)
            os.kill(job.pid(job.primary()), signal.SIGKILL)
            job.wait_for_steps(20)
            job.wait_for_backup(2)
            _, text = job.finish()
            assert " 0 numbers are wrong" in text
        assert (make_coordinator(f"etcd://{place}/{tmp_path.name}").read(0) or View(1, "nobody")).primary == ENDED
