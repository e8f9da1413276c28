"""Jobs with backups, as processes, whose etcd answers badly or is stopped when a replica is lost. Nothing is lost."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from support import processes
from support.own_etcd import started_etcd
from support.played_etcd import played_etcd
from support.scripts.launching import START, in_log, wait_until
from test_replicas import Job

from torchfleet.ps.coordination.background_coordinator import WAITS

AWAY = 3.0  # seconds
STOPPED = 40.0  # seconds


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "lost"])
def test_a_backup_keeps_its_rows_until_etcd_answers_well(tmp_path: Path, fault: str) -> None:
    """`lost`: the take-over is made, its answer is lost, and etcd is away then."""
    with played_etcd() as etcd:
        job = Job(tmp_path, "async", "--coordinator", f"etcd://{etcd.place}/run")
        with job.started:
            job.wait_for_backup(1)
            job.wait_for_steps(20)
            if fault == "lost":
                etcd.plan, etcd.then = {"kv/txn": "lost"}, "503"
            else:
                etcd.fault = fault
            os.kill(job.pid(0), signal.SIGKILL)
            wait_until(in_log(job.log(1), WAITS), START, "line of the backup")
            wait_until(in_log(job.log(0), WAITS), START, "line of the restarted replica")
            time.sleep(AWAY)
            etcd.fault = ""
            job.wait_for_steps(20)
            job.wait_for_backup(2)
            os.kill(job.pid(1), signal.SIGKILL)  # the one that was restarted without etcd has all
            job.wait_for_steps(20)
            _, text = job.finish()
            assert " 0 numbers are wrong" in text


@pytest.mark.slow
def test_a_job_that_starts_without_etcd_waits_for_it(tmp_path: Path) -> None:
    with played_etcd() as etcd:
        etcd.fault = "404"
        job = Job(tmp_path, "async", "--coordinator", f"etcd://{etcd.place}/run")
        with job.started:
            for replica in range(2):
                wait_until(in_log(job.log(replica), WAITS), START, "line of a replica that waits")
            etcd.fault = ""
            job.wait_for_backup(1)
            job.wait_for_steps(20)
            _, text = job.finish()
            assert " 0 numbers are wrong" in text
        for replica in range(2):
            said = [line.partition(WAITS)[2] for line in job.log(replica).read_text().splitlines() if WAITS in line]
            assert all(one != other for one, other in itertools.pairwise(said)), "a line is repeated on a change only"


@pytest.mark.long
@pytest.mark.parametrize("role", ["primary", "backup", "etcd", "worker", "fleetrun"])
def test_a_process_that_is_stopped_for_40_s_costs_nothing(tmp_path: Path, role: str) -> None:
    with started_etcd() as place:
        job = Job(tmp_path, "async", "--coordinator", f"etcd://{place}/{tmp_path.name}")
        with job.started:
            job.wait_for_backup(1)
            job.wait_for_steps(20)
            stopped = etcd_at(place) if role == "etcd" else process_of(job, role)
            os.kill(stopped, signal.SIGSTOP)
            try:
                end = time.monotonic() + STOPPED
                while time.monotonic() < end and role != "fleetrun":  # which writes the logs in which steps are counted
                    job.wait_for_steps(20)
                time.sleep(max(0.0, end - time.monotonic()))
            finally:
                os.kill(stopped, signal.SIGCONT)
            if role in ("primary", "backup"):
                job.wait_for_backup(2)
            primary = 1 if role == "primary" else 0
            os.kill(job.pid(primary), signal.SIGKILL)
            job.wait_for_steps(20)
            longest, text = job.finish()
            assert " 0 numbers are wrong" in text
            assert longest < STOPPED / 2


def process_of(job: Job, role: str) -> int:
    """`worker`: not the one whose steps are counted."""
    if role == "fleetrun":
        return int(job.started.process.pid)
    if role != "worker":
        return job.pid(1 if role == "backup" else 0)
    found = ((process, processes.environment_of(process)) for process in job.started.running())
    return next(int(process.pid) for process, own in found if own.get("FLEET_WORKER_INDEX") == "1")


def etcd_at(place: str) -> int:
    """The process of an etcd that this test has started."""
    children = psutil.Process().children()
    (found,) = (child for child in children if any(place in word for word in child.cmdline()))
    return int(found.pid)
