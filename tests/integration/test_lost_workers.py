"""Workers that are killed or stopped: in sync mode by the rule of --on_worker_loss; in elastic jobs by themselves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.messages import lines_naming
from support.paths import SCRIPTS
from support.scripts.gates import close_gates, open_gate
from support.scripts.launching import SOON, START, TINY, Forked, Started, forked_fleetrun, in_log, run_dir, wait_until

from torchfleet.launch.roles import free_ports

pytestmark = pytest.mark.slow

SCRIPT = str(SCRIPTS / "durable_job.py")
ROOT = str(Path(__file__).parents[2])
TIMEOUT = 5.0  # FLEET_WORKER_TIMEOUT of these jobs
JOB = ("--server_num", "1", "--worker_num", "2")


@contextlib.contextmanager
def sync_job(log_dir: Path, *options: str, steps: int = 60, timeout: float = TIMEOUT) -> Iterator[Started]:
    gates = log_dir / "gates"  # closed by a test
    arguments = (SCRIPT, "--mode", "sync", "--steps", str(steps), "--pause", "0.02", "--gates", str(gates))
    variables = {"PYTHONPATH": ROOT, "FLEET_WORKER_TIMEOUT": str(timeout)}
    with forked_fleetrun(log_dir, *JOB, *options, *arguments, **variables) as job:
        yield job


def digest(job: Started) -> str:
    assert job.wait() == 0, job.output
    found = re.search(r"digest: (\S+)", job.output)
    assert found
    return found[1]


def test_wait_a_killed_worker_is_started_again_and_the_job_equals_the_undisturbed_one(tmp_path: Path) -> None:
    with sync_job(tmp_path / "plain", timeout=60.0) as job:  # a worker that is lost would end it
        plain = digest(job)
    gates = tmp_path / "killed" / "gates"
    close_gates(gates, 20)
    with sync_job(tmp_path / "killed", "--on_worker_loss", "wait", "--max_restart", "1") as job:
        job.wait_for("worker 0 has made step 10")
        os.kill(job.pid("WORKER", 1), signal.SIGKILL)
        open_gate(gates, 20)
        assert digest(job) == plain
        assert lines_naming(job.output, "worker 1", "-9")


def test_go_on_a_stopped_worker_is_counted_out_told_and_started_again(tmp_path: Path) -> None:
    with sync_job(tmp_path, "--on_worker_loss", "go_on", "--max_restart", "1", steps=400) as job:
        job.wait_for("worker 0 has made step 10")
        pid = job.pid("WORKER", 1)
        os.kill(pid, signal.SIGSTOP)
        try:
            server_log = run_dir(tmp_path) / "serverlog.0"
            wait_until(
                lambda: bool(lines_naming(server_log.read_text(), "worker 1", "lost")), START, "word of its loss"
            )
            job.wait_for("worker 0 has made step 100")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert job.wait() == 0, job.output
        told = (run_dir(tmp_path) / "workerlog.1").read_text()
        assert re.search(r"worker 1\b.*\bstep \d+", told), told
        assert lines_naming(server_log.read_text(), "worker 1", "joined")
        assert lines_naming(server_log.read_text(), "again", "(1)")


class Elastic:
    """A server for 2 to 4 workers and the workers, as a scheduler starts them: by environment variables."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack, self.place = stack, f"127.0.0.1:{free_ports(1)[0]}"
        options = ("--endpoint", f"tcp://{self.place}", "--num_workers", "4", "--min_workers", "2")
        self.server = stack.enter_context(Forked([sys.executable, "-m", "torchfleet.server", *options]))
        stack.callback(self.server.process.terminate)

    def worker(self, index: int, *arguments: str) -> Started:
        variables = {
            "FLEET_ROLE": "WORKER",
            "FLEET_WORKER_INDEX": str(index),
            "FLEET_NUM_WORKERS": "4",
            "FLEET_MIN_WORKERS": "2",
            "FLEET_SERVER_ENDPOINTS": self.place,
            "FLEET_WORKER_TIMEOUT": str(TIMEOUT),
        }
        return self._stack.enter_context(Forked([sys.executable, TINY, "--mode", "async", *arguments], **variables))


def test_elastic_workers_come_and_go_and_the_last_one_ends_the_job(tmp_path: Path) -> None:
    end = tmp_path / "end"
    endless = ("--steps", "1000000", "--pause", "0.02", "--until", str(end), "--barrier")
    with contextlib.ExitStack() as stack:
        job = Elastic(stack)
        first = job.worker(0, *endless)
        wait_until(lambda: bool(lines_naming(job.server.output, "worker 0", "joined")), START, "worker 0")
        assert "is training" not in first.output
        second = job.worker(1, *endless)
        for worker in (first, second):
            worker.wait_for("is training")
        late = job.worker(3, *endless)
        late.wait_for("is training")
        os.kill(second.process.pid, signal.SIGKILL)
        wait_until(lambda: bool(lines_naming(job.server.output, "worker 1", "lost")), START, "word of its loss")
        end.touch()
        assert first.wait() == 0, first.output
        assert late.wait() == 0, late.output
        # As the servers said with the last sign of life: perhaps before the loss.
        assert re.search(r"worker 3 of [23] ends with loss", late.output), late.output
        assert job.server.wait(SOON) == 0, job.server.output


@pytest.mark.parametrize(("mode", "text"), [("sync", "this is sync")])
def test_elastic_sync_training_is_refused_by_name(mode: str, text: str) -> None:
    with contextlib.ExitStack() as stack:
        job = Elastic(stack)
        worker = job.worker(0, "--mode", mode)
        assert worker.wait() != 0
        assert text in worker.output


LAST = str(SCRIPTS / "last_barrier.py")


@contextlib.contextmanager
def last_barrier(log_dir: Path, *options: str, workers: int = 2) -> Iterator[Started]:
    """Once the first `workers` of them have trained."""
    variables = {"PYTHONPATH": ROOT, "FLEET_WORKER_TIMEOUT": str(TIMEOUT)}
    with forked_fleetrun(log_dir, *JOB, "--max_restart", "5", LAST, *options, **variables) as job:
        for worker in range(workers):
            log = run_dir(log_dir) / f"workerlog.{worker}"
            wait_until(in_log(log, f"worker {worker} has trained"), START, f"worker {worker}")
        yield job


def test_async_a_worker_killed_near_the_last_barrier_is_started_again_and_the_job_ends(tmp_path: Path) -> None:
    """It takes longer to start than a worker may be silent. Who waits for it neither fails nor is started again."""
    with last_barrier(tmp_path, "--comes", "--start", str(TIMEOUT + 4)) as job:
        os.kill(job.pid("WORKER", 1), signal.SIGKILL)
        assert job.wait() == 0, job.output
        assert lines_naming(job.output, "worker 1", "-9", "again")
        assert not lines_naming(job.output, "worker 0", "again")


def test_async_a_worker_that_waits_in_vain_is_not_started_again(tmp_path: Path) -> None:
    with last_barrier(tmp_path, "--sync_timeout", "3", workers=0) as job:  # it soon ends by itself
        assert job.wait() == 1, job.output
        assert lines_naming(job.output, "worker 0", "exit status 1", "the job ends")
        assert not lines_naming(job.output, "worker 0", "again")
