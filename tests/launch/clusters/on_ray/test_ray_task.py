"""A worker for which a cluster has no room at first: on the display, and started again when it fails. The actors are
stand-ins: a real Ray is slow to fill."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.scripts.launching import SOON, wait_until

from torchfleet.launch import supervisor
from torchfleet.launch.clusters.on_ray import ray_job
from torchfleet.launch.clusters.on_ray.ray_job import RayJob, RayPlan
from torchfleet.launch.clusters.on_ray.ray_node import Look, Work
from torchfleet.launch.clusters.on_ray.ray_task import NodeLost, RayTask
from torchfleet.launch.job_spec import JobSpec, Task
from torchfleet.launch.job_watch import snapshot_of
from torchfleet.launch.processes import Output


class Actor:
    """Placed when there is room; its process then runs until it is let go."""

    def __init__(self) -> None:
        self.room, self.end_of_it = threading.Event(), threading.Event()

    def place(self) -> str:
        if not self.room.is_set():
            raise NodeLost("no room")
        return "127.0.0.2:1"

    def start(self, work: Work) -> int:
        return 1

    def look(self, timeout: float) -> Look:
        self.end_of_it.wait(0.02)
        return Look(1, 0 if self.end_of_it.is_set() else None, {"steps": 3}, b"")

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def result(self) -> bytes:
        return b""

    def end(self) -> None: ...


def test_a_worker_that_waits_for_room_is_not_shown_as_done(tmp_path: Path) -> None:
    actor, task, said = Actor(), Task("worker", 1), []

    def state() -> str:
        return snapshot_of([made]).roles[0].state

    def moved(*_: Any) -> dict[str, str]:
        return {}

    output = Output(task, tmp_path / "log", said.append, echo=False, append=False)
    made = RayTask(Work(task, (), ""), actor, tmp_path, output, said.append, moved, needed=lambda: True)
    with contextlib.closing(made):
        assert (state(), made.returncode) == ("waiting", 0)  # no task waits for it
        actor.room.set()
        wait_until(lambda: state() == "running", SOON, "worker that runs")
        actor.end_of_it.set()
        wait_until(lambda: state() == "done", SOON, "worker that is done")


class JobActor(Actor):
    """An actor of a whole job. Its process ends with the next of `codes` when it is let go."""

    def __init__(self, codes: list[int], after: threading.Event | None = None) -> None:
        super().__init__()
        self.room.set()
        self.codes, self.works = codes, list[Work]()
        self.end_of_it = after or self.end_of_it

    def start(self, work: Work) -> int:
        self.works.append(work)
        return len(self.works)

    def look(self, timeout: float) -> Look:
        self.end_of_it.wait(0.02)
        code = self.codes[len(self.works) - 1] if self.end_of_it.is_set() else None
        if code == 0:
            self.ended()
        return Look(len(self.works), code, {"steps": 3, "mode": "async"}, b"")

    def ended(self) -> None: ...

    def move(self, moved: dict[str, str]) -> None: ...


def test_an_elastic_worker_that_joined_late_and_fails_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_TOO_LONG", SOON)  # of threads that a busy machine does not run
    late = JobActor([1, 0])  # fails, then ends well; the others end after it
    late.end_of_it.set()
    late_is_done = threading.Event()
    late.ended = late_is_done.set
    others = JobActor([0], late_is_done), JobActor([0], late_is_done)
    actors = iter([*others, late])

    def group(*asked: Any) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda *_: None, actor=lambda *_, **__: next(actors), close=lambda: None)

    for name, stand_in in {"PlacementGroup": group, "require_ray": lambda: None, "refuse_too_large": print}.items():
        monkeypatch.setattr(ray_job, name, stand_in)
    job = JobSpec(("train.py",), tmp_path, max_restart=1, min_workers=1, insecure=True)
    plan = RayPlan(("train.py",), "", num_servers=1, num_workers=2, min_workers=1)
    assert RayJob(job, plan, tmp_path, print).run({}, 0) == 0
    assert [work.task.environment.get("FLEET_RESTART") for work in late.works] == [None, "1"]
