"""What fleetrun does when processes fail, are killed or never end. Where training does not matter, stand-ins play.

What the system itself ends (children, and the processes of a killed launcher) is tried with interpreters of their own:
processes that the nursery forks are ended by the nursery.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.messages import lines_naming, names
from support.scripts.launching import (
    SOON,
    STAND_IN,
    START,
    TINY,
    Started,
    fleetrun,
    forked_fleetrun,
    in_log,
    run_dir,
    wait_until,
)

from torchfleet.launch import supervisor
from torchfleet.launch.job_spec import JobSpec, Task
from torchfleet.launch.roles import JobLayout

ENDLESS = ("--steps", "1000000", "--pause", "0.02")


def wait_for_training(job: Started, log_dir: Path, num_workers: int) -> None:
    """Until every worker has made its first step."""
    for index in range(num_workers):
        text = f"worker {index} is training"
        is_there = in_log(log_dir / "latest" / f"workerlog.{index}", text)
        wait_until(lambda is_there=is_there: is_there() or job.process.poll() is not None, START, text)
    assert job.process.poll() is None, job.output


def first_losses(log: Path) -> list[float]:
    return [float(found) for found in re.findall(r"first loss (\S+)", log.read_text())]


@pytest.mark.slow
class TestTraining:
    def test_a_worker_that_raises_ends_a_sync_job_at_once_and_is_quoted(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, "--worker_num", "2", TINY, *ENDLESS, "--fail_worker", "1") as job:
            assert job.wait() == 1
            ended = time.time()
            assert job.left(grace=0) == []
        failed = re.search(r"about to fail at (\S+)", (tmp_path / "latest" / "workerlog.1").read_text())
        assert failed
        assert ended - float(failed.group(1)) < SOON
        assert lines_naming(job.output, "worker 1", "status 1")
        assert lines_naming(job.output, run_dir(tmp_path) / "workerlog.1")
        assert "    Traceback (most recent call last):" in job.output
        assert "    RuntimeError: this worker was told to fail" in job.output

    def test_a_killed_server_ends_the_job_and_is_named_with_its_address(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, TINY, *ENDLESS, "--mode", "async") as job:
            wait_for_training(job, tmp_path, 1)
            os.kill(job.pid("SERVER", 0), signal.SIGKILL)
            assert job.wait(SOON) == 1
            assert job.left(grace=0) == []
        assert re.search(r"server 0 \(127\.0\.0\.1:\d+\).*SIGKILL", job.output)

    def test_an_async_job_goes_on_without_a_killed_worker_but_does_not_count_as_a_success(self, tmp_path: Path) -> None:
        done = tmp_path / "done"
        arguments = ("--private", "keys", "--worker_num", "2", TINY, *ENDLESS, "--mode", "async", "--until", str(done))
        with forked_fleetrun(tmp_path, *arguments) as job:
            wait_for_training(job, tmp_path, 2)
            os.kill(job.pid("WORKER", 1), signal.SIGKILL)
            job.wait_for("SIGKILL", SOON)
            done.touch()
            assert job.wait(SOON) == 1
            assert job.left(grace=0) == []
        assert "[worker 0] worker 0 of 2 ends with loss" in job.output
        assert lines_naming(job.output, "[fleetrun]", "worker 1")
        assert "worker 1 of 2 ends" not in (tmp_path / "latest" / "workerlog.1").read_text()

    def test_a_sync_job_ends_with_a_killed_worker(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, "--worker_num", "2", TINY, *ENDLESS) as job:
            wait_for_training(job, tmp_path, 2)
            os.kill(job.pid("WORKER", 1), signal.SIGKILL)
            assert job.wait(SOON) == 1
            assert job.left(grace=0) == []
        assert lines_naming(job.output, "worker 1", "SIGKILL")

    def test_a_killed_worker_is_started_again_and_goes_on_from_what_servers_hold(self, tmp_path: Path) -> None:
        done = tmp_path / "done"
        arguments = ("--max_restart", "1", TINY, *ENDLESS, "--mode", "async", "--until", str(done))
        with forked_fleetrun(tmp_path, *arguments) as job:
            wait_for_training(job, tmp_path, 1)
            job.wait_for("samples/s", SOON)  # a line of the display
            status = run_dir(tmp_path) / ".status.worker.0"
            wait_until(lambda: json.loads(status.read_text())["steps"] >= 20, SOON, "steps")
            os.kill(job.pid("WORKER", 0), signal.SIGKILL)
            job.wait_for("-9", SOON)
            wait_until(lambda: len(first_losses(tmp_path / "latest" / "workerlog.0")) == 2, START, "second start")
            done.touch()
            assert job.wait(SOON) == 0
            assert job.left(grace=0) == []
        before, after = first_losses(tmp_path / "latest" / "workerlog.0")
        assert after < before / 2
        assert "lost" not in job.output

    def test_ctrl_c_ends_everything(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, "--worker_num", "2", TINY, *ENDLESS) as job:
            wait_for_training(job, tmp_path, 2)
            rates = r"[\d,.]+ samples/s \(mean [\d,.]+\)"
            line = rf"\[fleetrun\] [\d:]+(?: s)?  {rates} \| loss \d\.\d+ \| \d+ rows, servers busy"
            wait_until(lambda: re.search(line, job.output) is not None, SOON, "line of the display")
            os.kill(job.process.pid, signal.SIGINT)
            assert job.wait(SOON) == 130
            assert job.left(grace=0) == []
        assert lines_naming(job.output, "[fleetrun]", "SIGINT", 3)
        assert "Traceback" not in job.output

    def test_a_port_in_use_ends_the_job_with_the_reason(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            place = f"127.0.0.1:{taken.getsockname()[1]}"
            with forked_fleetrun(tmp_path, "--plain", "--servers", place, "--workers", "127.0.0.1:0", TINY) as job:
                assert job.wait() == 1
                assert job.left(grace=0) == []
        assert lines_naming(job.output, "server 0", place, "status 1")
        assert f"tcp://{place}" in job.output


class TestStandIns:
    def test_the_exit_status_and_the_last_lines_of_a_failed_worker_are_shown(self, tmp_path: Path) -> None:
        actions = ",".join(f"line:{i}" for i in range(30))
        with forked_fleetrun(tmp_path, "--worker_num", "2", STAND_IN, "sleep", f"{actions},exit:7") as job:
            assert job.wait(SOON) == 1
        assert re.search(r"worker [01]\b.*status 7\b", job.output)
        quoted = [line.strip() for line in job.output.splitlines() if line.startswith("    ")]
        assert quoted == [*(f"line {i}" for i in range(11, 30)), "exit 7"]

    def test_a_killed_server_is_named_by_its_own_index_and_address(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, "--server_num", "2", STAND_IN, "sleep", "sleep") as job:
            wait_until(in_log(tmp_path / "latest" / "serverlog.1", "sleep"), SOON, "server 1")
            os.kill(job.pid("SERVER", 1), signal.SIGKILL)
            assert job.wait(SOON) == 1
        assert re.search(r"server 1 \(127\.0\.0\.1:\d+\).*SIGKILL", job.output)

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_processes_that_do_not_listen_to_sigterm_are_ended_too(
        self, tmp_path: Path, number: signal.Signals, status: int
    ) -> None:
        with fleetrun(tmp_path, STAND_IN, "deaf,child,sleep", "deaf,child,sleep") as job:
            for name in ("serverlog.0", "workerlog.0"):
                wait_until(in_log(tmp_path / "latest" / name, "sleep"), SOON, name)
            os.kill(job.process.pid, number)
            assert job.wait(SOON) == status
            assert job.left(grace=SOON) == []

    def test_processes_end_with_a_launcher_that_was_killed(self, tmp_path: Path) -> None:
        with fleetrun(tmp_path, "--plain", "--worker_num", "2", STAND_IN, "serve", "sleep") as job:
            wait_until(in_log(tmp_path / "latest" / "serverlog.0", "listening on"), SOON, "server")
            wait_until(in_log(tmp_path / "latest" / "workerlog.1", "sleep"), SOON, "worker")
            os.kill(job.process.pid, signal.SIGKILL)
            assert job.wait(SOON) == -signal.SIGKILL
            assert job.left(grace=SOON) == []

    def test_children_of_a_worker_end_with_the_job(self, tmp_path: Path) -> None:
        done = tmp_path / "done"
        roles = (f"until:{done}", f"async,child,leave,touch:{done},exit")
        with fleetrun(tmp_path / "log", STAND_IN, *roles) as job:
            assert job.wait(SOON) == 0
            assert job.left(grace=SOON) == []

    def test_children_of_a_worker_that_was_started_again_end_with_the_job(self, tmp_path: Path) -> None:
        done = tmp_path / "done"
        roles = (f"until:{done}", f"async,child,die,leave,touch:{done}")
        with fleetrun(tmp_path / "log", "--max_restart", "1", STAND_IN, *roles) as job:
            assert job.wait(SOON) == 0
            assert lines_naming(job.output, "worker 0", "-9")
            assert job.left(grace=SOON) == []

    def test_restarts_are_counted_and_the_log_keeps_every_run(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, "--max_restart", "2", STAND_IN, "sleep", "async,exit:3") as job:
            assert job.wait(SOON) == 1
        assert len(lines_naming(job.output, "[fleetrun] worker 0", 3)) == 3
        assert len(lines_naming(job.output, "worker 0", "status 3")) == 1
        assert (tmp_path / "latest" / "workerlog.0").read_text().count("exit 3") == 3

    def test_a_worker_that_fails_by_its_own_script_ends_an_async_job(self, tmp_path: Path) -> None:
        """Only a killed one is done without: a script that raises would raise elsewhere too."""
        with forked_fleetrun(tmp_path, "--worker_num", "2", STAND_IN, "sleep", "async,exit:3") as job:
            assert job.wait(SOON) == 1
        assert re.search(r"worker [01]\b.*status 3\b", job.output)

    def test_a_job_that_lost_its_last_worker_does_not_say_that_it_finished(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, "--plain", STAND_IN, "serve", "async,reach,sleep:0.3,die") as job:
            assert job.wait(SOON) == 1
        assert lines_naming(job.output, "worker 0", "SIGKILL")
        for wrong in ("without it", "finished"):
            assert wrong not in job.output

    @pytest.mark.parametrize("status", [0, 3])
    def test_a_server_that_ends_before_the_workers_ends_the_job(self, tmp_path: Path, status: int) -> None:
        """With status 0 too: a server that gets SIGTERM from an operator or a scheduler ends cleanly, and early."""
        with forked_fleetrun(tmp_path, STAND_IN, f"exit:{status}", "sleep") as job:
            assert job.wait(SOON) == 1
        assert re.search(r"server 0 \(127\.0\.0\.1:\d+\)", job.output)

    @pytest.mark.parametrize("has_left", [True, False])
    def test_servers_may_take_longer_to_stop_than_to_be_found_without_workers(
        self, tmp_path: Path, has_left: bool
    ) -> None:
        """Workers that say that they leave have told the servers to stop: those may be busy, or their machine."""
        done = tmp_path / "done"
        worker = f"async,leave,touch:{done}" if has_left else f"async,touch:{done}"
        server = f"until:{done},sleep:7" if has_left else f"until:{done},sleep"  # the latter never ends by itself
        with forked_fleetrun(tmp_path / "log", STAND_IN, server, worker) as job:
            assert job.wait(SOON) == (0 if has_left else 1)
        assert ("[fleetrun] finished" in job.output) == has_left
        assert ("fleet.stop_worker()" in job.output) != has_left

    def test_servers_that_were_never_told_to_stop_end_after_the_last_worker(self, tmp_path: Path) -> None:
        """A script that forgets fleet.stop_worker(): all workers of the job are here and have ended."""
        with forked_fleetrun(tmp_path, STAND_IN, "sleep", "exit:0") as job:
            job.wait(SOON)
            assert job.left(grace=0) == []

    @pytest.mark.parametrize("server", ["exit", "sleep"])
    def test_a_script_that_never_calls_init_is_no_finished_job(self, tmp_path: Path, server: str) -> None:
        """It ran once for every role, and trained as often by itself. Starting it again would not help."""
        with forked_fleetrun(tmp_path, "--worker_num", "2", "--max_job_restart", "1", STAND_IN, server, "line") as job:
            assert job.wait(SOON) == 1
        assert lines_naming(job.output, "[fleetrun] warning", "3 times", "fleet.init()", "fleet.prepare()")
        assert "finished" not in job.output

    def test_a_worker_killed_by_a_signal_without_a_name_is_told_like_any_other(self, tmp_path: Path) -> None:
        with forked_fleetrun(tmp_path, STAND_IN, "sleep", "signal:40") as job:
            assert job.wait(SOON) == 1
        assert re.search(r"worker 0\b.*\b40\b", job.output)

    def test_variables_of_another_job_around_it_do_not_reach_the_processes(self, tmp_path: Path) -> None:
        """fleetrun in a pod or a shell that has a role already: the roles are those that fleetrun gives."""
        around = {
            "TRAINING_ROLE": "PSERVER",
            "PADDLE_TRAINERS_NUM": "3",
            "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.2:1,10.0.0.3:1",
            "FLEET_RESTART": "5",
        }
        done = tmp_path / "done"
        roles = (f"role,until:{done}0,until:{done}1", f"async,role,leave,touch_own:{done}")
        with forked_fleetrun(tmp_path / "log", "--worker_num", "2", STAND_IN, *roles, **around) as job:
            assert job.wait(SOON) == 0
        told = (tmp_path / "log" / "latest" / "workerlog.1").read_text()
        for part in (
            "role='worker'",
            "worker_index=1",
            "num_workers=2",
            "worker_endpoints=('127.0.0.1:1', '127.0.0.1:2')",
            "restart=0",
        ):
            assert part in told

    def test_two_jobs_at_once_keep_their_logs_and_status_files_apart(self, tmp_path: Path) -> None:
        with fleetrun(tmp_path, STAND_IN, "sleep", "line:first,async,sleep") as first:
            wait_until(in_log(tmp_path / "latest" / "workerlog.0", "line first"), SOON, "first job")
            before = run_dir(tmp_path)
            done = tmp_path / "done"
            roles = (f"until:{done}", f"line:second,async,leave,touch:{done},exit")
            with fleetrun(tmp_path, STAND_IN, *roles) as second:
                assert second.wait(SOON) == 0
            assert first.process.poll() is None
            assert (before / ".status.worker.0").exists()
            first.process.terminate()
            assert first.wait(SOON) == 143
        after = run_dir(tmp_path)
        assert before != after
        for folder, text, job in ((before, "line first", first), (after, "line second", second)):
            assert text in (folder / "workerlog.0").read_text()
            assert lines_naming(job.output, "[fleetrun]", folder)
        assert "line second" not in (before / "workerlog.0").read_text()

    def test_a_file_in_the_place_of_the_link_is_named_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "latest").mkdir()
        with forked_fleetrun(tmp_path, STAND_IN, "exit", "exit") as job:
            assert job.wait(SOON) == 2
        assert lines_naming(job.output, tmp_path / "latest")
        assert (tmp_path / "latest").is_dir()


FAILS_ONCE = """
import os, sys, time
from pathlib import Path

here = Path(sys.argv[1])
print("start", flush=True)
if os.environ["FLEET_ROLE"] == "WORKER" and len(list(here.glob("failed*"))) < int(sys.argv[2]):
    (here / f"failed{time.time_ns()}").touch()
    sys.exit(3)
own = Path(os.environ["FLEET_STATUS_FILE"])
if os.environ["FLEET_ROLE"] == "WORKER":
    new = own.with_name("worker.new")
    new.write_text('{"role": "worker", "mode": "sync", "left": true}')  # as after fleet.stop_worker()
    new.replace(own)
else:
    own.write_text('{"role": "server"}')
    while not own.with_name(".status.worker.0").exists():  # a server never ends before the worker has left
        time.sleep(0.05)
"""


@pytest.mark.parametrize(("num_failures", "max_job_restart", "status"), [(2, 3, 0), (2, 1, 1), (0, 1, 0)])
def test_a_job_that_fails_is_started_again_as_a_whole(
    num_failures: int, max_job_restart: int, status: int, tmp_path: Path
) -> None:
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(FAILS_ONCE)
    arguments = ("--max_job_restart", str(max_job_restart), str(script), str(tmp_path), str(num_failures))
    with forked_fleetrun(logs, *arguments) as job:
        assert job.wait(SOON) == status
        assert job.left(grace=0) == []
    num_starts = min(num_failures, max_job_restart) + 1
    assert (logs / "latest" / "workerlog.0").read_text().count("start") == num_starts  # logs of all starts are kept
    assert job.output.count(f" of {max_job_restart})") == num_starts - 1


def test_one_worker_or_the_whole_job_is_started_again_but_not_both(tmp_path: Path) -> None:
    with forked_fleetrun(tmp_path, "--max_job_restart", "1", "--max_restart", "1", STAND_IN) as job:
        assert job.wait(SOON) == 2
    assert names(job.output, "--max_job_restart", "--max_restart")


class Played:
    """A process that ends when it is told to."""

    num_restarts, is_waiting = 0, False

    def __init__(self, index: int, folder: Path) -> None:
        self.task, self.log = Task("worker", index), folder / f"workerlog.{index}"
        self.returncode: int | None = None
        self.own_status: dict[str, Any] = {}

    def status(self) -> dict[str, Any]:
        return self.own_status

    def last_lines(self, num: int = 20) -> list[str]:
        return []

    def signal(self, number: int) -> None: ...

    def close(self) -> None: ...


def end_of_job(workers: list[Played], folder: Path) -> int:
    """The exit status of a job of these workers."""
    places, tasks = tuple(f"127.0.0.1:{1 + i}" for i in range(len(workers))), [worker.task for worker in workers]
    job, layout = JobSpec(("train.py",), folder), JobLayout((), places, (), tuple(range(len(workers))))
    return supervisor.JobSupervisor(job, layout, tasks, folder, start=lambda task, *_: workers[task.index]).run()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_is_named_whose_end_is_seen_after_that_of_its_peer(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its connections are closed first: a peer may notice that, fail and have ended meanwhile."""
    workers = [Played(index, tmp_path) for index in range(2)]
    workers[1 - killed].returncode = 1

    def sleep(seconds: float) -> None:
        workers[killed].returncode = -signal.SIGKILL

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert end_of_job(workers, tmp_path) == 1
    assert lines_naming(capsys.readouterr().out, f"worker {killed}", "SIGKILL")


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_worker_that_raised_is_named_before_one_that_waited_for_it(
    guilty: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [Played(index, tmp_path) for index in range(2)]
    for worker in workers:
        worker.returncode = 1
    workers[1 - guilty].own_status = {"mode": "sync", "waited_in_vain": True}
    assert end_of_job(workers, tmp_path) == 1
    assert lines_naming(capsys.readouterr().out, f"worker {guilty}", "exit status 1")
