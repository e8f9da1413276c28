"""Roles started by hand, without a launcher: a process that waits for a worker that is gone, or that waits
elsewhere, is told its name within seconds, and none trains with workers that do not belong to the job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.messages import lines_naming, names, naming
from support.scripts.launching import SOON, START, TINY, Forked, Started, wait_until

from torchfleet.launch.roles import free_ports

pytestmark = pytest.mark.slow

TIMEOUT = 15.0  # FLEET_WORKER_TIMEOUT of these jobs; far below SOON
ENDLESS = ("--steps", "1000000", "--pause", "0.02")


class Job:
    """A server and workers as a user starts them from shells: by environment variables."""

    def __init__(self, stack: contextlib.ExitStack, num_workers: int) -> None:
        self._stack, self._num_workers = stack, num_workers
        self.place = f"127.0.0.1:{free_ports(1)[0]}"

    def server(self, *options: str, num_workers: int | None = None) -> Started:
        place = ("--endpoint", f"tcp://{self.place}", "--num_workers", str(num_workers or self._num_workers))
        server = self._stack.enter_context(Forked([sys.executable, "-m", "torchfleet.server", *place, *options]))
        self._stack.callback(server.process.wait, 20)
        self._stack.callback(server.process.terminate)
        return server

    def worker(self, index: int, *arguments: str, **more: str) -> Started:
        own = {"FLEET_ROLE": "WORKER", "FLEET_WORKER_INDEX": str(index), "FLEET_NUM_WORKERS": str(self._num_workers)}
        settings = {"FLEET_SERVER_ENDPOINTS": self.place, "FLEET_WORKER_TIMEOUT": str(TIMEOUT)}
        return self._stack.enter_context(Forked([sys.executable, TINY, *arguments], **own, **settings, **more))


@pytest.fixture
def job() -> Iterator[Job]:
    """Of two workers."""
    with contextlib.ExitStack() as stack:
        yield Job(stack, 2)


def wait_for_training(*workers: Started) -> None:
    for worker in workers:
        worker.wait_for("is training", START)


def assert_ends_with(process: Started, *texts: str) -> None:
    """It fails soon, with these words and without a doubt about the server, which is well."""
    assert process.wait(SOON) != 0
    for text in texts:
        assert re.search(text, process.output), process.output
    assert "ServerUnreachable" not in process.output


def test_a_killed_worker_is_named_to_the_one_that_waits_and_a_second_of_its_number_is_refused(job: Job) -> None:
    server = job.server("--orphan_timeout", "10")
    first, second = job.worker(0, *ENDLESS), job.worker(1, *ENDLESS)
    wait_for_training(first, second)
    double = job.worker(1, *ENDLESS)
    assert double.wait(START) != 0
    there = rf"worker 1\b.*pid {second.process.pid}\b"
    assert re.search(there, double.output), double.output
    assert names(double.output, "FLEET_WORKER_INDEX", "PADDLE_TRAINER_ID")
    assert first.process.poll() is None
    os.kill(second.process.pid, signal.SIGKILL)
    assert_ends_with(first, rf"worker 1 \(\S+, pid {second.process.pid}\)", r"optimizer\.step")
    assert server.wait(SOON) == 1
    assert re.search("no worker", server.output, re.IGNORECASE)


def test_workers_that_wait_in_a_circle_are_told_who_waits_where(job: Job) -> None:
    job.server()
    workers = [job.worker(index, "--steps", "5", "--fewer", "2", "--barrier") for index in range(2)]
    wait_for_training(*workers)
    for worker in workers:
        assert_ends_with(worker, naming("worker 0", "optimizer.step()", "worker 1", "barrier 'workers'"))


def test_a_worker_that_ends_without_stop_worker_is_named(job: Job) -> None:
    job.server()
    first, second = (job.worker(index, "--steps", "5", "--fewer", "2", "--forget_stop") for index in range(2))
    wait_for_training(first, second)
    assert second.wait(START) == 0
    assert_ends_with(first, rf"worker 1 \(\S+, pid {second.process.pid}\).*fleet\.stop_worker\(\)")


def test_a_worker_that_was_told_of_another_number_of_workers_is_refused(job: Job) -> None:
    server, worker = job.server(num_workers=1), job.worker(1)
    assert worker.wait(START) != 0
    assert lines_naming(worker.output, "worker 1", 2, 1)
    assert names(worker.output, "FLEET_NUM_WORKERS", "PADDLE_TRAINERS_NUM")
    assert server.process.poll() is None  # it waits for the worker that it was told of


def test_a_worker_with_a_wrong_port_says_for_whom_it_waits_and_ends(job: Job) -> None:
    worker = job.worker(0, FLEET_START_TIMEOUT="6")
    assert worker.wait(START) != 0
    where = f"server 0 (tcp://{job.place})"
    assert lines_naming(worker.output, "waiting", where)
    assert lines_naming(worker.output, where, 6, "FLEET_START_TIMEOUT")


def test_a_stopped_async_worker_disturbs_nobody_and_goes_on_when_it_is_continued(job: Job, tmp_path: Path) -> None:
    server = job.server()
    end = tmp_path / "end"
    first = job.worker(0, "--mode", "async", "--steps", "200", "--pause", "0.01")
    second = job.worker(1, "--mode", "async", *ENDLESS, "--until", str(end))
    wait_for_training(first, second)
    os.kill(second.process.pid, signal.SIGSTOP)
    try:
        assert first.wait(START) == 0
        wait_until(lambda: f"pid {second.process.pid}) is lost: no sign of life" in server.output, SOON, "word of it")
        assert server.process.poll() is None
    finally:
        os.kill(second.process.pid, signal.SIGCONT)
    end.touch()
    assert second.wait(START) == 0
    assert server.wait(SOON) == 0
