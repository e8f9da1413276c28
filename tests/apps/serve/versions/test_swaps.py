"""Versions that are swapped while several processes read them, and processes that are killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import processes
from support.chains import PLAIN, Chain
from support.numbered_versions import NumberedVersions
from support.paths import SCRIPTS

from torchfleet.apps.serve.versions import follow_process
from torchfleet.apps.serve.versions.follower import FollowSettings
from torchfleet.apps.serve.versions.mapped_model import MappedModel, open_mapped
from torchfleet.apps.serve.versions.rollback import ask, versions
from torchfleet.base.errors import CheckpointError

WAIT = 120.0


def start_reader(folder: Path) -> Any:
    command = [sys.executable, str(SCRIPTS / "reading_versions.py"), str(folder)]
    return processes.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT
    while not is_so():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("num_swaps", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_swaps_under_load_give_no_wrong_answer(tmp_path: Path, num_swaps: int) -> None:
    versions = NumberedVersions(tmp_path)
    versions.publish()
    readers = [start_reader(tmp_path) for _ in range(3)]
    wait_until(lambda: len(list(tmp_path.glob("reads-*"))) == 3)
    while versions.number < num_swaps:
        versions.publish()
        if versions.number == num_swaps // 2:
            os.kill(readers[0].pid, signal.SIGKILL)
            readers[0].communicate(timeout=WAIT)
            readers[0] = start_reader(tmp_path)
            wait_until(lambda: len(list(tmp_path.glob("reads-*"))) == 4)
    (tmp_path / "end").touch()
    found = [json.loads(reader.communicate(timeout=WAIT)[0]) for reader in readers]
    assert [reader["wrong"] for reader in found] == [[], [], []]
    assert all(reader["num"] for reader in found)
    assert len({number for reader in found for number in reader["versions"]}) > 5
    assert len(list(tmp_path.glob("level-*"))) < 30
    versions.close()


@pytest.fixture
def forked_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfleet.apps.serve.versions.follow_process.subprocess.Popen", processes.Popen)


class Job:
    """Saves of a job, and a process that serves them."""

    def __init__(self, folder: Path) -> None:
        self.model_dir, self.work = folder / "model", folder / "work"
        self.work.mkdir()
        self.chain = Chain(str(self.model_dir), (PLAIN,))
        self.number = 0
        self.save(full=True)
        settings = FollowSettings(str(self.model_dir), every=0.05, spacing=0.0, unread=0.5)
        self.model = open_mapped(str(self.model_dir), True, str(self.work), settings=settings)

    def save(self, full: bool = False) -> None:
        self.number += 1
        self.chain.save(1, {"plain": [(7, self.number), (self.number, 1)]}, full=full)

    @property
    def answer(self) -> float:
        return float(self.model.current().rows("plain", np.array([7]))[0, 0])


@pytest.fixture
def job(tmp_path: Path, forked_writers: None) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.model.close()
    wait_until(lambda: not follow_process.has_writer(made.work))


@pytest.mark.slow
def test_a_killed_writer_is_started_again_and_answers_go_on(job: Job) -> None:
    assert job.answer == 1.0
    job.save()
    wait_until(lambda: job.answer == 2.0)
    before, first = job.model.current().number, job.model.status().pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not follow_process.has_writer(job.work) or job.model.status().pid not in (0, first))
    assert job.answer == 2.0
    job.save()
    wait_until(lambda: job.answer == 3.0)
    assert job.model.current().number > before
    wait_until(lambda: job.model.status().pid not in (0, first))  # a version is there before the status that follows it


@pytest.mark.slow
def test_processes_share_one_writer_and_a_user_goes_back_and_on(job: Job) -> None:
    other = MappedModel(job.work, follow=True)
    for _ in range(2):
        job.save()
        wait_until(lambda: job.answer == job.number)
    assert len(versions(job.work)) >= 3
    target = next(v.number for v in versions(job.work) if v.source.startswith("save 2 "))
    restored = ask(job.work, target)
    assert restored.restored == target
    wait_until(lambda: job.answer == 2.0 and other.current().number == restored.number)
    with pytest.raises(CheckpointError, match="expected one of"):
        ask(job.work, 10_000)
    job.save()
    assert job.answer == 2.0
    ask(job.work, 0)
    wait_until(lambda: job.answer == 4.0)
    assert float(other.current().rows("plain", np.array([7]))[0, 0]) in (2.0, 4.0)
    other.close()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_writers")
def test_a_model_that_is_not_followed_is_read_once_and_the_writer_ends(tmp_path: Path) -> None:
    chain = Chain(str(tmp_path / "model"), (PLAIN,))
    chain.save(2, {"plain": [(7, 5)]}, full=True)
    model = open_mapped(str(tmp_path / "model"), follow=False)
    assert model.current().rows("plain", np.array([7, 8])).tolist() == [[5.0], [0.0]]
    assert model.current().created == 86_400.0  # as Chain dates its first save
    assert model.age > 0
    folder = model._folder
    wait_until(lambda: not follow_process.has_writer(folder))
    model.close()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_writers")
def test_without_a_model_the_error_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no saved model"):
        open_mapped(str(tmp_path / "nothing"), follow=True)
