"""What a process tells its launcher, and what the launcher makes of whatever it finds."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor import status
from torchfleet.base.monitor.status import StatusFile
from torchfleet.launch.job_spec import Task
from torchfleet.launch.processes import Process, end_all


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(status, "time", made)
    monkeypatch.setattr(status, "_PATIENCE", 60.0)  # a thread may not run for seconds
    return made


class TestStatusFile:
    def test_what_is_made_is_in_the_file(self, tmp_path: Path) -> None:
        StatusFile(str(tmp_path / "status"), lambda: {"steps": 3, "mode": "sync"}).write(now=True)
        told = json.loads((tmp_path / "status").read_text())
        assert (told["steps"], told["mode"], told["pid"], told["host"]) == (
            3,
            "sync",
            os.getpid(),
            socket.gethostname(),
        )
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert 0.1 * peak < told["memory"] < 1.1 * peak

    def test_without_a_path_nothing_is_made_or_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        silent = StatusFile(None, lambda: pytest.fail("nobody asked for it"))
        silent.write()
        silent.write(now=True)
        assert list(tmp_path.iterdir()) == []

    def test_it_is_written_twice_a_second_however_often_it_is_called(self, tmp_path: Path, clock: Clock) -> None:
        made: list[float] = []
        file = StatusFile(str(tmp_path / "status"), lambda: {"at": made.append(clock.now) or clock.now})
        for _ in range(300):  # three seconds of steps, a hundredth of a second each
            file.write()
            clock.now += 0.01
        file.close()
        assert 6 <= len(made) <= 7
        assert json.loads((tmp_path / "status").read_text())["at"] == made[-1]

    def test_now_means_now(self, tmp_path: Path, clock: Clock) -> None:
        numbers = iter(range(10))
        file = StatusFile(str(tmp_path / "status"), lambda: {"number": next(numbers)})
        for expected in range(3):
            file.write(now=True)
            assert json.loads((tmp_path / "status").read_text())["number"] == expected

    def test_a_reader_finds_the_old_whole_or_the_new_whole(self, tmp_path: Path) -> None:
        """The file that readers see is replaced, never written into."""
        path = tmp_path / "status"
        file = StatusFile(str(path), lambda: {"text": "x" * 100_000})
        file.write(now=True)
        with open(path) as opened_before:
            file.write(now=True)
            assert path.stat().st_ino != Path(f"/proc/self/fd/{opened_before.fileno()}").stat().st_ino
            assert len(json.load(opened_before)["text"]) == 100_000
        assert [found.name for found in tmp_path.iterdir()] == ["status"]

    def test_threads_that_write_at_the_same_time_write_one_after_the_other(self, tmp_path: Path) -> None:
        inside, most = [0], [0]

        def make() -> dict[str, Any]:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.002)
            inside[0] -= 1
            return {"text": "x" * 1000}

        file = StatusFile(str(tmp_path / "status"), make)
        with ThreadPoolExecutor(4) as pool:
            for written in [pool.submit(file.write, now=True) for _ in range(20)]:
                written.result(60)
        assert most == [1]
        assert not file._file._has_told, "a write failed: another thread had taken its unfinished file away"
        assert [found.name for found in tmp_path.iterdir()] == ["status"]

    def test_training_does_not_wait_for_the_disk(self, tmp_path: Path, clock: Clock) -> None:
        """A pipe without a reader stands in the place of a disk that does not answer."""
        path, unfinished, steps = tmp_path / "status", tmp_path / "status.part", iter(range(10))
        os.mkfifo(unfinished)
        file = StatusFile(str(path), lambda: {"steps": next(steps)})
        file.write()
        deadline = time.monotonic() + 30
        while file._file._latest is not None:  # until its thread is at it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for _ in range(2):
            clock.now += 1
            file.write()
        assert not path.exists()
        with open(unfinished) as disk:  # now it answers
            assert json.load(disk)["steps"] == 0
        file.close()
        assert json.loads(path.read_text())["steps"] == 2, "the last one is there at the end"

    def test_no_thread_is_left_when_it_is_closed(self, tmp_path: Path, clock: Clock) -> None:
        before = set(threading.enumerate())
        file = StatusFile(str(tmp_path / "status"), dict)
        for _ in range(3):
            file.write()
            clock.now += 1
        assert len(set(threading.enumerate()) - before) == 1
        file.close()
        assert set(threading.enumerate()) <= before

    def test_one_that_fails_while_it_is_made_leaves_the_old_one(self, tmp_path: Path) -> None:
        path = tmp_path / "status"
        StatusFile(str(path), lambda: {"steps": 1}).write(now=True)
        with pytest.raises(TypeError):
            StatusFile(str(path), lambda: {"steps": object()}).write()
        assert json.loads(path.read_text())["steps"] == 1


class TestProcessStatus:
    @pytest.fixture
    def process(self, tmp_path: Path) -> Iterator[Process]:
        made = Process(Task("worker", 0), [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, None)
        yield made
        end_all([made])
        assert made.returncode is not None

    def test_it_is_empty_before_the_process_has_said_anything(self, process: Process) -> None:
        assert process.status() == {}

    def test_it_is_what_the_process_said(self, process: Process) -> None:
        StatusFile(str(process.status_file), lambda: {"steps": 4, "loss": float("nan")}).write(now=True)
        assert process.status()["steps"] == 4

    @pytest.mark.parametrize(
        "garbage", [b"", b"{", b'{"steps": 1', b"\xff\xfe\x00", b"[1, 2]", b"3", b"null", b'"text"', b"\x00" * 100]
    )
    def test_garbage_reads_as_nothing_said(self, process: Process, garbage: bytes) -> None:
        process.status_file.write_bytes(garbage)
        assert process.status() == {}

    def test_what_an_earlier_job_left_is_not_taken_for_this_one(self, tmp_path: Path) -> None:
        (tmp_path / ".status.worker.3").write_text('{"mode": "async"}')
        process = Process(Task("worker", 3), [sys.executable, "-c", ""], tmp_path, None)
        try:
            assert process.status() == {}
        finally:
            end_all([process])

    def test_no_status_file_is_left_when_the_process_is_closed(self, process: Process, tmp_path: Path) -> None:
        process.status_file.write_text("{}")
        end_all([process])
        assert [found.name for found in tmp_path.iterdir()] == ["workerlog.0"]


class TestWorkerStatus:
    @pytest.fixture
    def fleet(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A local job of one linear layer, at its first step, with a status file."""
        import torchfleet as fleet
        from torchfleet.api.current_job import current

        monkeypatch.setattr(current, "job", None)
        monkeypatch.setenv("FLEET_STATUS_FILE", str(tmp_path / "status"))
        monkeypatch.delenv("FLEET_ROLE", raising=False)
        monkeypatch.delenv("TRAINING_ROLE", raising=False)
        fleet.init()
        model = fleet.distributed_model(torch.nn.Linear(2, 1))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.init_worker()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        return fleet

    def test_a_worker_tells_mode_steps_and_what_it_reports(self, fleet: Any, tmp_path: Path) -> None:
        fleet.report(loss=0.25)
        fleet.stop_worker()
        told = json.loads((tmp_path / "status").read_text())
        assert (told["role"], told["mode"], told["steps"], told["samples"]) == ("worker", "sync", 1, 4)
        assert told["metrics"] == {"loss": 0.25}
        assert told["samples_per_s"] == pytest.approx(4 * told["steps_per_s"])
        assert "queue" not in told  # sync mode has none

    def test_progress_is_of_passes_of_training_and_samples_are_without_evaluation(
        self, fleet: Any, tmp_path: Path
    ) -> None:
        from torchfleet.api.current_job import get_worker

        worker = get_worker()
        model, optimizer = worker.model, worker._optimizers[0]
        batches = [torch.ones(4, 2)] * 3

        def progress() -> dict[str, Any]:
            worker.status.write(now=True)
            told = json.loads((tmp_path / "status").read_text())
            return {**told.get("progress", {}), "samples": told["samples"]}

        for epoch in fleet.epochs(2):
            for batch in fleet.prefetch(batches):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            for batch in fleet.prefetch(batches):
                model(batch)
                with torch.no_grad():
                    model.train()(batch)
                model.eval()
            model.train()
            found = progress()
            assert found.pop("eta_s") >= 0
            told = {"epoch": epoch, "epochs": 2, "done": 3, "total": 3, "unit": "batches"}
            assert found == {**told, "samples": 4 + 12 * (1 + epoch)}
        fleet.stop_worker()

    @pytest.mark.parametrize("name", ["mode", "steps", "rows", "samples_per_s"])
    def test_a_metric_does_not_replace_what_the_launcher_relies_on(self, fleet: Any, tmp_path: Path, name: str) -> None:
        """The mode decides whether a job goes on without a worker; `rows` of a worker would end the display."""
        with contextlib.suppress(FleetError):  # refusing the name is as good
            fleet.report(**{name: 123.0})
        fleet.stop_worker()
        assert json.loads((tmp_path / "status").read_text()).get(name) != 123.0


@pytest.mark.slow
def test_the_last_steps_of_a_rank_count_though_its_script_just_ends(tmp_path: Path) -> None:
    script = """
import os, torch, torchfleet as fleet
fleet.init(is_collective=True)
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(50):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if os.fork() == 0:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    raise SystemExit
os.wait()
"""
    environment = {**os.environ, "FLEET_STATUS_FILE": str(tmp_path / "status")}
    done = processes.run([sys.executable, "-c", script], timeout=200, env=environment)
    assert done.returncode == 0, done.stdout
    told = json.loads((tmp_path / "status").read_text())
    assert (told["steps"], told["samples"]) == (50, 200)
