"""The pass loop on several workers: all train the same part, and whatever goes wrong on one of them ends it on all;
killed at any moment, it ends with the model of a run that was not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.messages import lines_naming, names
from support.scripts import online_job
from support.scripts.launching import Started, forked_fleetrun
from support.scripts.online_parts import HOURS, Parts, Tiny, assert_same, held, step

import torchfleet as fleet
from torchfleet.apps import online
from torchfleet.apps.online import agreement, pass_progress, passes
from torchfleet.base.errors import FleetError
from torchfleet.ps.net.wire import Role
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

pytestmark = pytest.mark.xdist_group("online_fleets")  # its fixtures are made once

SCRIPT = Path(online_job.__file__)


class Crash(Exception):
    pass


class Facade:
    """The functions of torchfleet for workers that are threads of one process."""

    def __init__(self) -> None:
        self._own = threading.local()
        self.saves: list[tuple[int, Any]] = []

    def enter(self, part: jobs.Part) -> None:
        self._own.part = part

    @property
    def _worker(self) -> Any:
        return self._own.part.worker

    def is_first_worker(self) -> bool:
        return self.worker_index() == 0

    def worker_index(self) -> int:
        return self._own.part.index

    def worker_num(self) -> int:
        return self._worker.info.num_workers

    def gather(self, name: str, data: bytes) -> list[bytes]:
        with self._worker.workers() as all_workers:
            return all_workers.gather(name, data)

    def flush(self) -> None:
        self._worker.communicator.flush()

    def stats(self) -> Any:
        return self._worker.stats()

    def report(self, **metrics: float) -> None:
        pass

    def set_time(self, seconds: float) -> None:
        assert self.is_first_worker()

    def saved_extra(self, dirname: str) -> None:
        return None

    def save_persistables(self, dirname: str, mode: int, extra: Any) -> None:
        assert self.is_first_worker()
        self.saves.append((mode, extra["online"]["part"]))

    def stop_worker(self) -> None:
        self._worker.client.leave()

    def get_job(self) -> Any:
        return self._own.part.job


class Together:
    """Workers of one job in threads; each returns its reports, or what was raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleet = Facade()
        for module in (passes, agreement, pass_progress):
            monkeypatch.setattr(module, "fleet", self.fleet)
        monkeypatch.setattr(agreement, "process_role", self.fleet)
        monkeypatch.setattr(passes, "current_job", self.fleet)

    def run(
        self, train: Callable[..., None], mode: str = "sync", num: int = 2, source: Any = None, **options: Any
    ) -> list[Any]:
        def body(part: jobs.Part) -> Any:
            self.fleet.enter(part)
            own = {name: (lambda *a, f=f: f(part, *a)) if callable(f) else f for name, f in options.items()}
            try:
                return online.train_passes(
                    source or Parts(HOURS[:3]), "model", lambda p, files: train(part, p, files), **own
                )
            except Exception as error:
                return error

        made = jobs.run(body, Tiny, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), mode=mode, num_workers=num)
        return made.results


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    return Together(monkeypatch)


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_workers_train_the_same_part_and_get_the_same_reports(together: Together, mode: str) -> None:
    seen: list[tuple[int, str]] = []

    def train(worker: jobs.Part, part: online.Part, files: list[str]) -> None:
        seen.append((worker.index, files[0]))
        time.sleep(0.02 * worker.index)
        step(worker.model, worker.optimizer, worker.index)

    results = together.run(train, mode, 3)
    assert results[0] == results[1] == results[2]
    assert [report.part for report in results[0]] == HOURS[:3]
    assert [report.samples for report in results[0]] == [24] * 3
    assert sorted(seen) == [(i, f"{name} {i} of 3") for i in range(3) for name in HOURS[:3]]
    assert [name for _, name in seen] == sorted((name for _, name in seen), key=lambda name: name[:11])
    assert together.fleet.saves == [(0, HOURS[0]), (1, HOURS[1]), (1, HOURS[2])]


def test_all_files_go_to_everybody_for_training_only(together: Together) -> None:
    seen: list[tuple[int, str, str]] = []
    results = together.run(
        lambda worker, part, files: seen.append((worker.index, "train", files[0])),
        evaluate=lambda worker, part, files: seen.append((worker.index, "evaluate", files[0])),
        all_files=True,
    )
    assert len(results[0]) == 3
    wanted = [(i, "train", f"{name} 0 of 1") for i in range(2) for name in HOURS[:3]]
    wanted += [(i, "evaluate", f"{name} {i} of 2") for i in range(2) for name in HOURS[:3]]
    assert sorted(seen) == sorted(wanted)


def test_the_auc_is_over_all_workers_and_nobody_trains_before_all_have_evaluated(together: Together) -> None:
    rng = np.random.default_rng(0)
    scores, labels = torch.from_numpy(rng.normal(size=90)), torch.from_numpy(rng.integers(0, 2, 90))
    order: list[str] = []

    def evaluate(worker: jobs.Part, part: online.Part, files: list[str]) -> Any:
        time.sleep(0.03 * worker.index)
        order.append("evaluate")
        if worker.index == 2:
            return None  # it has no samples
        meter = fleet.metrics.AUC()
        meter.update(scores[worker.index :: 2], labels[worker.index :: 2])
        return meter

    results = together.run(lambda *_: order.append("train"), num=3, evaluate=evaluate)
    expected = fleet.metrics.AUC()
    expected.update(scores, labels)
    assert [report.auc for result in results for report in result] == [expected.compute()[0]] * 9
    assert [report.samples for report in results[0]] == [90] * 3
    assert order == (["evaluate"] * 3 + ["train"] * 3) * 3


def test_different_aucs_are_an_error(together: Together) -> None:
    errors = together.run(lambda *_: None, evaluate=lambda worker, *_: fleet.metrics.AUC(10 + worker.index))
    assert all("num_thresholds" in str(error) for error in errors)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_worker_ends_all(together: Together, mode: str, failing: int) -> None:
    """Also in sync mode, where the others are waiting for its gradients in the middle of the part."""

    def train(worker: jobs.Part, part: online.Part, files: list[str]) -> None:
        for i in range(3):
            if worker.index == failing and part.name == HOURS[1] and i == 1:
                raise Crash("a line that cannot be read")
            step(worker.model, worker.optimizer, i)

    start = time.monotonic()
    errors = together.run(train, mode, 3)
    assert time.monotonic() - start < jobs.SECONDS, "the others waited for as long as they could"
    for index, error in enumerate(errors):
        if index == failing:
            assert isinstance(error, Crash)
        else:
            assert isinstance(error, FleetError)
            assert names(str(error), f"part {HOURS[1]}", 1, 3)
    assert together.fleet.saves == [(0, HOURS[0])]


@pytest.mark.parametrize("where", ["evaluate", "source"])
def test_errors_elsewhere_end_all_too(together: Together, where: str) -> None:
    class Broken(Parts):
        def next(self, position: Any) -> online.Part | None:
            if position == 1 and where == "source":
                raise Crash("no such bucket")
            return super().next(position)

    def evaluate(worker: jobs.Part, part: online.Part, files: list[str]) -> None:
        if where == "evaluate" and part.name == HOURS[1] and worker.index == 0:
            raise Crash("no such column")

    errors = together.run(lambda *_: None, source=Broken(), evaluate=evaluate)
    assert isinstance(errors[0], Crash)
    assert isinstance(errors[1], FleetError)
    wanted = f"part {HOURS[1]} is not complete" if where == "evaluate" else f"no part after {HOURS[0]} can begin"
    assert names(str(errors[1]), wanted, 1, 2)


def test_a_worker_that_dies_is_missed(together: Together) -> None:
    """The launcher tells the servers that it has gone; the part must not be saved as complete."""

    def train(worker: jobs.Part, part: online.Part, files: list[str]) -> None:
        if worker.index == 1 and part.name == HOURS[1]:
            client = Client(worker.worker._servers.connect(), worker=1, role=Role.LAUNCHER, patience=Patience(10, 2))
            client.leave()
            raise Crash

    errors = together.run(train, "async", 2)
    assert names(str(errors[0]), 1, 2)
    assert together.fleet.saves == [(0, HOURS[0])]


def test_workers_at_different_points_find_out(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them comes back and begins anew, while the other one is in the middle of a part."""
    real = agreement.gather_at

    def lost(stage: str, part: str, data: Any = None) -> list[Any]:
        if together.fleet.worker_index() == 1 and stage == "trained" and part == HOURS[1]:
            stage, part = "part", ""
        return real(stage, part, data)

    monkeypatch.setattr(passes, "gather_at", lost)
    errors = together.run(lambda *_: None)
    assert all(isinstance(error, FleetError) for error in errors)
    assert names(str(errors[0]), "'trained'", HOURS[1], "'part'")


# Processes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hours")
    online_job.write_parts(folder, HOURS)
    return folder


def test_killed_at_any_moment_again_and_again(tmp_path: Path, data: Path) -> None:
    options = ["--data", str(data), "--model_dir", str(tmp_path / "m"), "--until", HOURS[-1], "--kills", "8"]
    found = jobs.command([str(SCRIPT), *options], 200).splitlines()
    assert json.loads(found[-1])["killed"] >= 3  # a fast machine may come to the end before the eighth
    assert_same(tmp_path / "m", tmp_path / "m-whole")


def started(log: Path, data: Path, model: Path, *options: str, servers: int = 1) -> Started:
    counts = ("--server_num", str(servers), "--worker_num", "2")
    given = ("--data", str(data), "--model_dir", str(model), "--until", HOURS[-1], *options)
    return forked_fleetrun(log, *counts, str(SCRIPT), *given)


@pytest.mark.slow
def test_a_fleet_whose_server_is_killed_ends_with_the_model_of_one_that_was_not(tmp_path: Path, data: Path) -> None:
    """The last run has two servers instead of one."""
    with started(tmp_path / "log", data, tmp_path / "whole") as job:
        assert job.wait() == 0, job.output
    kills = ("--kill", "server", HOURS[4])
    with started(tmp_path / "killed", data, tmp_path / "m", *kills) as job:
        assert job.wait() == 1, job.output
    assert lines_naming(job.output, "[fleetrun]", "server 0", "SIGKILL")
    assert held(tmp_path / "m")[1]["online"]["part"] == HOURS[3]
    with started(tmp_path / "log", data, tmp_path / "m", *kills, servers=2) as job:
        assert job.wait() == 0, job.output
    assert_same(tmp_path / "m", tmp_path / "whole")


@pytest.mark.slow
def test_a_fleet_that_loses_a_worker_ends(tmp_path: Path, data: Path) -> None:
    """In async mode the launcher goes on without a killed worker; the loop does not."""
    with started(tmp_path / "log", data, tmp_path / "m", "--mode", "async", "--kill", "worker", HOURS[1]) as job:
        assert job.wait() == 1, job.output
    assert lines_naming(job.output, f"part {HOURS[1]}", 1, 2)
    assert held(tmp_path / "m")[1]["online"]["part"] == HOURS[0]
