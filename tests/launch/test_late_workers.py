"""Elastic jobs on one machine: workers that join when cores are free, leave, and come back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.messages import lines_naming
from support.scripts.launching import SOON, STAND_IN, START, TINY, in_log, wait_until

from torchfleet.launch import cli, late_workers, supervisor
from torchfleet.launch.job_spec import JobSpec, Report, Task
from torchfleet.launch.late_workers import LateWorker, LateWorkers


class Played:
    """A process that ends when the test says so."""

    num_restarts, is_waiting = 0, False

    def __init__(self, task: Task) -> None:
        self.task, self.log = task, Path(task.log_name)
        self.returncode: int | None = None
        self.told: dict[str, Any] = {}

    def status(self) -> dict[str, Any]:
        return self.told

    def last_lines(self, num: int = 20) -> list[str]:
        return []

    def signal(self, number: int) -> None:
        self.returncode = -number

    def restart(self) -> None:
        self.num_restarts += 1
        self.returncode = None

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode

    close = kill


class Job:
    """One server, one lasting worker and workers 1 and 2, which come later, on a machine with `cores`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: str = "1") -> None:
        self.cores, self.now = 2, 100.0
        self.started: list[Played] = []
        self.left: list[int] = []
        self.lines: list[str] = []
        job = JobSpec(command=("python",), log_dir=Path("log"), num_workers=3, min_workers=1)
        monkeypatch.setattr(late_workers, "usable_cores", lambda: self.cores)
        monkeypatch.setattr(late_workers, "time", self)
        monkeypatch.setattr(late_workers, "leave_for", lambda worker, way, servers: self.left.append(worker))
        monkeypatch.setattr(late_workers, "start_here", lambda job, log_dir: self.start)
        self.late = LateWorkers(job, ["127.0.0.1:1"], Path("log"))
        tasks = [Task("server", 0), *(Task("worker", i, {"OMP_NUM_THREADS": threads}) for i in range(3))]
        self.server, self.first, *late = (self.late.start(task, self.lines.append, False, False) for task in tasks)
        self.workers = [worker for worker in late if isinstance(worker, LateWorker)]

    def monotonic(self) -> float:
        return self.now

    def start(self, task: Task, report: Report, echo: bool, append: bool) -> Played:
        self.started.append(Played(task))
        return self.started[-1]

    def pass_time(self, seconds: float = 1.0) -> None:
        """As the supervisor looks, ten times a second."""
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            self.late.look()

    @property
    def running(self) -> list[int]:
        return [worker.task.index for worker in self.workers if worker.is_running]

    def process(self, index: int) -> Played:
        return [each for each in self.started if each.task.role == "worker" and each.task.index == index][-1]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_workers_join_one_by_one_as_cores_are_free_and_leave_when_there_are_fewer(job: Job) -> None:
    job.pass_time(10)
    assert job.running == []
    assert [worker.is_waiting for worker in job.workers] == [True, True]
    assert [worker.returncode for worker in job.workers] == [0, 0]
    job.cores = 3
    job.pass_time()
    assert job.running == [1]
    assert job.workers[0].returncode is None
    job.cores = 16
    job.pass_time()
    assert job.running == [1, 2]
    job.cores = 3
    job.pass_time()
    assert job.running == [1]
    assert job.left == [2]
    assert job.workers[1].is_waiting


def test_a_worker_needs_as_many_cores_as_it_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, threads="4")
    for cores, running in ((8, []), (9, [1]), (12, [1]), (13, [1, 2])):
        job.cores = cores
        job.pass_time()
        assert job.running == running, cores


def test_a_killed_worker_leaves_and_comes_back_later_each_time(job: Job) -> None:
    job.cores = 3
    job.pass_time()
    for number, pause in enumerate((5.0, 10.0, 20.0), 1):
        job.process(1).returncode = -signal.SIGKILL
        assert job.workers[0].returncode is None, "the supervisor must not take it for a failure"
        job.pass_time()
        assert job.left == [1] * number
        assert job.workers[0].is_waiting or job.running == [2]
        job.workers[1].not_before = job.now + 1000  # so that only worker 1 can take the core
        if job.running == [2]:
            job.workers[1].leave(is_told=True)
            job.workers[1].not_before = job.now + 1000
        job.pass_time(pause - 2)
        assert job.running == []
        job.pass_time(2)
        assert job.running == [1]


def test_a_script_that_fails_is_a_failure(job: Job) -> None:
    job.cores = 3
    job.pass_time()
    job.process(1).returncode = 1
    job.pass_time()
    assert job.workers[0].returncode == 1
    job.workers[0].restart()  # --max_restart
    job.pass_time()
    assert job.running == [1]
    assert job.workers[0].num_restarts == 1


def test_when_the_first_workers_have_finished_none_joins_and_one_without_a_step_is_ended(job: Job) -> None:
    job.cores = 3
    job.pass_time()
    job.first.signal(0)  # ends with status 0
    job.cores = 16
    job.pass_time(3)
    assert job.running == []
    assert [worker.returncode for worker in job.workers] == [0, 0]
    assert not any(worker.is_waiting for worker in job.workers)


def test_a_worker_at_its_steps_goes_on_when_the_first_have_finished_and_its_loss_then_counts(job: Job) -> None:
    job.cores = 3
    job.pass_time()
    job.process(1).told = {"steps": 3}
    job.first.signal(0)
    job.pass_time(10)
    assert job.running == [1]
    job.process(1).returncode = -signal.SIGKILL
    job.pass_time()
    assert job.workers[0].returncode == -signal.SIGKILL


def test_none_joins_while_a_server_has_ended(job: Job) -> None:
    job.server.signal(0)  # ends with status 0, before the first worker does
    job.cores = 16
    job.pass_time(10)
    assert job.running == []
    job.server.restart()
    job.pass_time()
    assert job.running == [1, 2]


def test_a_worker_that_the_supervisor_ends_has_ended(job: Job) -> None:
    job.cores = 3
    job.pass_time()
    job.workers[0].signal(signal.SIGTERM)
    assert job.workers[0].returncode == -signal.SIGTERM
    assert job.left == []


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The cores of the machine, as the launcher in this process sees them."""
    found = [2]
    monkeypatch.setattr(late_workers, "usable_cores", lambda: found[0])
    return found


def test_threads_that_are_no_number_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert cli.main(["--log_dir", str(tmp_path / "log"), "--worker_num", "1:2", STAND_IN, "exit", "exit"]) == 2
    assert lines_naming(capsys.readouterr().err, "OMP_NUM_THREADS", "many")
    assert not (tmp_path / "log").exists()


ONE_JOINS = """
import os, sys, time
from pathlib import Path

here = Path(sys.argv[1])


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)


def workers():
    return [Path("/proc", path.suffix[1:]) for path in here.glob("worker.*")]


if os.environ["FLEET_ROLE"] == "SERVER":
    wait_until(lambda: len(workers()) >= 2 and not any(worker.exists() for worker in workers()))
    sys.exit()
own = Path(os.environ["FLEET_STATUS_FILE"])
own.write_text('{"role": "worker", "mode": "async"}')
(here / f"worker.{os.getpid()}").touch()
if os.environ["FLEET_WORKER_INDEX"] == "0":
    wait_until(lambda: len(workers()) >= 2)
    new = own.with_name("left.new")
    new.write_text('{"role": "worker", "mode": "async", "left": true}')
    new.replace(own)
else:
    time.sleep(1000)  # it makes no step, and is ended after worker 0
"""


def test_the_supervisor_lets_a_worker_join_and_the_job_finishes(
    cores: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(late_workers, "leave_for", lambda worker, way, servers: None)  # a stand-in does not listen
    cores[0] = 3
    (tmp_path / "train.py").write_text(ONE_JOINS)
    line = ["--log_dir", str(tmp_path / "log"), "--worker_num", "1:3", str(tmp_path / "train.py"), str(tmp_path)]
    assert cli.main(line) == 0
    assert lines_naming(capfd.readouterr().out, "[fleetrun]", "worker 1", 3)
    logs = (tmp_path / "log" / "latest").glob("workerlog.*")
    assert sorted(path.name for path in logs) == ["workerlog.0", "workerlog.1"]


LATE_FAILS = """
import os, sys, time
from pathlib import Path

here = Path(sys.argv[1])


def wait_for(pattern, num):
    deadline = time.monotonic() + 60
    while len(list(here.glob(pattern))) < num and time.monotonic() < deadline:
        time.sleep(0.05)


if os.environ["FLEET_ROLE"] == "SERVER":
    wait_for("finished", 1)
elif os.environ["FLEET_WORKER_INDEX"] == "1":
    (here / f"failed{time.time_ns()}").touch()
    sys.exit(3)  # before fleet.init_worker()
else:
    Path(os.environ["FLEET_STATUS_FILE"]).write_text('{"role": "worker", "mode": "async"}')
    wait_for("failed*", int(sys.argv[2]))
    (here / "finished").touch()
"""


@pytest.mark.parametrize("max_restart", [0, 1])
def test_a_late_worker_that_fails_before_it_joins_is_left_and_the_job_finishes(
    max_restart: int, cores: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    left: list[int] = []
    monkeypatch.setattr(supervisor, "leave_for", lambda worker, way, servers: left.append(worker))
    cores[0] = 3
    (tmp_path / "train.py").write_text(LATE_FAILS)
    line = ["--log_dir", str(tmp_path / "log"), "--worker_num", "1:2", "--max_restart", str(max_restart)]
    assert cli.main([*line, str(tmp_path / "train.py"), str(tmp_path), str(1 + max_restart)]) == 1  # one was lost
    assert (tmp_path / "finished").exists()
    assert len(list(tmp_path.glob("failed*"))) == 1 + max_restart
    assert left == [1]


@pytest.mark.long
def test_a_real_worker_joins_training_is_killed_and_comes_back(
    cores: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(late_workers, "_FIRST_PAUSE", 0.1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    end, log, status = tmp_path / "end", tmp_path / "log" / "latest" / "workerlog.1", list[int]()
    line = ["--log_dir", str(tmp_path / "log"), "--worker_num", "1:2", TINY, "--mode", "async"]
    line += ["--steps", "1000000", "--pause", "0.02", "--until", str(end)]
    running = threading.Thread(target=lambda: status.append(cli.main(line)), daemon=True)
    running.start()
    try:
        wait_until(in_log(tmp_path / "log" / "latest" / "workerlog.0", "is training"), START, "worker 0")
        assert not log.exists()
        cores[0] = 3
        wait_until(in_log(log, "worker 1 is training"), START, "worker 1")
        os.kill(pid_of_worker(1), signal.SIGKILL)
        wait_until(lambda: log.read_text().count("worker 1 is training") == 2, START, "worker 1 again")
    finally:
        end.touch()
        running.join(SOON)
    told = capfd.readouterr().out
    assert status == [0], told
    assert lines_naming(told, "[fleetrun]", "worker 1", "joins", 3)
    assert lines_naming(told, "[fleetrun]", "worker 1", "SIGKILL")
    server = (tmp_path / "log" / "latest" / "serverlog.0").read_text()
    assert len(lines_naming(server, "worker 1", "joined")) == 2


def pid_of_worker(index: int) -> int:
    wanted = {"FLEET_ROLE": "WORKER", "FLEET_WORKER_INDEX": str(index)}
    children = psutil.Process().children(recursive=True)
    return next(int(child.pid) for child in children if wanted.items() <= child.environ().items())
