"""Servers with a log and a backup each, as processes: one replica or all are killed. Nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from support.messages import lines_naming
from support.scripts.gates import close_gates, open_gate
from support.scripts.launching import START, Started, forked_fleetrun, run_dir, wait_until

SCRIPT = str(Path(__file__).parents[1] / "support" / "scripts" / "durable_job.py")
ROOT = str(Path(__file__).parents[2])
JOB = ("--server_num", "1", "--worker_num", "2", "--durability", "log", "--replicas", "2", "--max_restart", "4")


NAMED, ALONE, TAKEN = " is the backup now", "goes on alone", "takes over as primary"


def start(log_dir: Path, mode: str, *options: str, steps: int = 90) -> Started:
    script = (SCRIPT, "--mode", mode, "--pause", "0.01", "--steps", str(steps), "--gates", str(log_dir / "gates"))
    return forked_fleetrun(log_dir, *JOB, *options, *script, PYTHONPATH=ROOT)


def said(log_dir: Path, *texts: str) -> int:
    """How often the replicas have said one of these."""
    logs = [run_dir(log_dir) / name for name in ("serverlog.0", "serverlog.0.replica1")]
    return sum(log.read_text().count(text) for log in logs if log.exists() for text in texts)


def in_step(log_dir: Path, num: int) -> None:
    """Wait until a backup was named so often."""
    wait_until(lambda: said(log_dir, NAMED) >= num, START, "backup that is in step")


def kill(job: Started, *replicas: int) -> None:
    found = [job.pid("SERVER", 0, replica) for replica in replicas]
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def result(log_dir: Path, name: str, mode: str, *kills: tuple[int, ...]) -> str:
    """What the job prints at its end, if these replicas are killed on the way: those of one tuple at once.

    The workers wait for each kill: without that they could be through before the next backup is in step.
    """
    gates = [20 + 20 * number for number in range(len(kills))]
    close_gates(log_dir / "gates", *gates)
    named = 0  # a busy machine may have a backup named anew without a kill
    with start(log_dir, mode) as job:
        for number, replicas in enumerate(kills):
            in_step(log_dir, named + 1)
            job.wait_for(f"worker 0 has made step {10 + 20 * number}")
            named = said(log_dir, NAMED)
            kill(job, *replicas)
            open_gate(log_dir / "gates", gates[number])
        assert job.wait() == 0, job.output
        assert len(lines_naming(job.output, "[fleetrun]", "SIGKILL")) == sum(map(len, kills))
        found = re.search(rf"{name}: (\S+)", job.output)
    assert found
    assert not (run_dir(log_dir) / "server_state").exists()
    return found[1]


@pytest.mark.long
def test_async_training_loses_and_doubles_no_step_whoever_is_killed(tmp_path: Path) -> None:
    assert result(tmp_path, "steps counted", "async", (0, 1), (0,), (1, 0)) == "180"


@pytest.mark.slow
def test_sync_training_equals_the_undisturbed_run_bit_for_bit_whoever_is_killed(tmp_path: Path) -> None:
    plain = result(tmp_path / "plain", "digest", "sync")
    assert result(tmp_path / "killed", "digest", "sync", (0,), (0, 1)) == plain


@pytest.mark.slow
def test_a_new_job_goes_on_from_the_log_of_the_backup_that_took_over(tmp_path: Path) -> None:
    store = ("--log_store", str(tmp_path / "store"))
    with start(tmp_path / "killed", "async", *store, steps=100_000) as job:
        in_step(tmp_path / "killed", 1)
        job.wait_for("worker 0 has made step 10")
        named = said(tmp_path / "killed", NAMED)
        kill(job, 0)
        in_step(tmp_path / "killed", named + 1)
        before, pid = said(tmp_path / "killed", ALONE, TAKEN), job.pid("SERVER", 0, 0)
        os.kill(pid, signal.SIGSTOP)  # the backup now: its log does not grow any more
        wait_until(lambda: said(tmp_path / "killed", ALONE, TAKEN) > before, START, "replica that is alone")
        job.process.kill()
        with contextlib.suppress(ProcessLookupError):  # it may have been ended with fleetrun
            os.kill(pid, signal.SIGCONT)
        assert not job.left(30.0)
    with start(tmp_path / "again", "async", *store, steps=10) as job:
        assert job.wait() == 0, job.output
        found = re.search(r"steps counted: (\S+)", job.output)
    assert found
    assert float(found[1]) > 30, "steps that were made before are there"
    log = (run_dir(tmp_path / "again") / "serverlog.0.replica1").read_text()
    assert "restored from its log" in log, "the newest log is that of replica 1"
    assert not list((tmp_path / "store").glob("*/start")), "nobody goes on from a job that is over"
