"""A worker for which a cluster has no room yet, on the display. The actor is a stand-in: a real Ray is slow to fill."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from support.scripts.launching import SOON, wait_until

from torchfleet.launch.clusters.on_ray.ray_node import Look, Work
from torchfleet.launch.clusters.on_ray.ray_task import NodeLost, RayTask
from torchfleet.launch.job_spec import Task
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
