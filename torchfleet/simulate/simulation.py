"""A simulated job from its first process to its report."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torchfleet.errors import FleetError
from torchfleet.simulate.conditions import Job
from torchfleet.simulate.coordinator import Coordinator, Member, ProcessFailed
from torchfleet.simulate.forecast import Forecast
from torchfleet.simulate.forks import Child, fork, prepare
from torchfleet.simulate.meeting_place import MeetingPlace

_PERIOD = 5.0  # seconds between two lines about how far it is
_LOOK = 0.2  # seconds between two looks at the log that is shown
_LAST_LINES = 20


class Interrupted(Exception):
    """A signal has come."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Simulation:
    """One run of a job in virtual time. `say` prints a line."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self.forecast = Forecast(len(job.servers), job.num_workers)
        self._children: list[Child] = []
        self._shown = next(part for part in job.parts if part.role == "worker").log
        self._read = 0  # bytes of the log that were shown
        self._started = time.monotonic()
        self._next_look = self._next_line = 0.0

    def run(self) -> int:
        """Run the job to its end and return its exit status. No process of it is left when this returns."""
        prepare()
        before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        except Interrupted as error:
            self._say(f"[fleetrun] {signal.Signals(error.number).name}: ending {len(self._children)} processes")
            return 128 + error.number
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._end_all()

    def _run(self) -> int:
        epoch = time.time()
        for number in range(len(self._job.parts)):
            self._children.append(fork(self._job, number, epoch))
        link = self._job.conditions.link
        members = [Member(child.part, i, child.line, link) for i, child in enumerate(self._children)]
        self.coordinator = Coordinator(members, link, MeetingPlace(link).serve, self.forecast.note, self._look)
        self._started = time.monotonic()
        self._next_line = self._started + _PERIOD
        try:
            self.coordinator.run()
        except ProcessFailed as error:
            self._show_log()
            self._say(f"[fleetrun] {error}; the simulation ends. Last lines of {error.part.log}:")
            for line in error.part.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]:
                self._say(f"    {line}")
            return 1
        except FleetError as error:
            self._show_log()
            self._say(f"[fleetrun] {error}")
            return 1
        self._show_log()
        self._report()
        return 0

    def _look(self, now: float) -> None:
        wall = time.monotonic()
        if wall < self._next_look:
            return
        self._next_look = wall + _LOOK
        self._show_log()
        if wall >= self._next_line:
            self._next_line = wall + _PERIOD
            self._say(f"[fleetrun] {now:.2f} s simulated in {wall - self._started:.0f} s: {self.forecast.num_steps:,} steps")

    def _show_log(self) -> None:
        """Lines of the first worker that are not shown yet."""
        if not self._shown.exists():
            return
        with open(self._shown, "rb") as log:
            log.seek(self._read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._say(f"[worker 0] {line}")

    def _report(self) -> None:
        rates, now = self.forecast.rates(), self.coordinator.now
        self._say(f"[fleetrun] {now:.3f} s of virtual time in {time.monotonic() - self._started:.1f} s; {rates}, {self.forecast.staleness()}")

    def _end_all(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
            child.line.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
