"""Runs a simulated job, from its first process to its report."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from torchfleet.base.errors import FleetError
from torchfleet.launch.simulate.conditions import Job, Part
from torchfleet.launch.simulate.coordinator import Coordinator, Member, ProcessFailed
from torchfleet.launch.simulate.forecast import Figures, Forecast
from torchfleet.launch.simulate.forks import Child, end, fork, prepare
from torchfleet.launch.simulate.rank_meetings import MeetingPlace
from torchfleet.launch.simulate.trace import Trace

_PERIOD = 5.0  # seconds between two progress messages
_LOOK = 0.2  # seconds between two polls of the log that is shown
_LAST_LINES = 20


class Interrupted(Exception):
    """A signal arrived."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Enough(Exception):
    """All workers have made `max_steps` steps."""


class Simulation:
    """One run of a job in virtual time. `say` prints a line. The figures are written to simulation.json in
    `run_dir`."""

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        say: Callable[[str], None],
        trace: Trace | None = None,
        max_steps: int | None = None,
    ) -> None:
        """`trace` receives all packets. With `max_steps` the simulation ends silently when each worker has made that
        many steps."""
        self._job, self._run_dir, self._say, self._trace, self._max_steps = job, run_dir, say, trace, max_steps
        self.forecast = Forecast(len(job.servers), job.num_workers)
        self._children: list[Child] = []
        self._log = Tail(next(part for part in job.parts if part.role == "worker"), say)
        self._started = time.monotonic()
        self._next_look = self._next_line = 0.0
        self._members: list[Member] = []
        self.figures: Figures | None = None

    def run(self) -> int:
        """Run the job to its end and return its exit status. No process of the job is left when this returns."""
        before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            prepare()
            return self._run()
        except Interrupted as error:
            self._say(f"[fleetrun] {signal.Signals(error.number).name}: ending {len(self._children)} processes")
            return 128 + error.number
        finally:
            for number in before:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
            for child in self._children:
                end(child)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        epoch = time.time()
        for number in range(len(self._job.parts)):
            self._children.append(fork(self._job, number, epoch))
            self._children[-1].look = self._log.show
        link = self._job.conditions.link
        self._members = [Member(child.part, child.line, link) for child in self._children]
        place = MeetingPlace(link)
        coordinator = Coordinator(self._members, link, place.serve, self.forecast.note, self._look, self._trace)
        self._started = time.monotonic()
        self._next_line = self._started + _PERIOD
        try:
            with contextlib.suppress(_Enough):
                coordinator.run()
        except FleetError as error:
            self._log.show()
            self._tell_of(error)
            return 1
        self._log.show()
        self._finish(coordinator.now)
        return 0

    def _tell_of(self, error: FleetError) -> None:
        if not isinstance(error, ProcessFailed):
            self._say(f"[fleetrun] {error}")
            return
        self._say(f"[fleetrun] {error}; the simulation ends. Last lines of {error.part.log}:")
        for line in error.part.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]:
            self._say(f"    {line}")

    def _finish(self, now: float) -> None:
        self.figures = self._figures(now)
        if self._max_steps is not None:
            return
        (self._run_dir / "simulation.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.figures)))
        for line in self.figures.lines():
            self._say(f"[fleetrun] {line}")

    def _figures(self, now: float) -> Figures:
        servers = [member.history for member in self._members if member.part.role == "server"]
        return self.forecast.figures(now, time.monotonic() - self._started, servers)

    def _look(self, now: float) -> None:
        if self._max_steps is not None and self.forecast.fewest_steps >= self._max_steps:
            raise _Enough
        wall = time.monotonic()
        if wall < self._next_look:
            return
        self._next_look = wall + _LOOK
        self._log.show()
        if wall >= self._next_line:
            self._next_line = wall + _PERIOD
            figures = self._figures(now)
            speed = f", {figures.samples_per_s:,.0f} samples/s" if figures.samples_per_s else ""
            self._say(
                f"[fleetrun] {now:.2f} s simulated in {figures.wall_seconds:.0f} s: {figures.steps:,} steps{speed}"
            )


class Tail:
    """Shows what a process writes to its log, line by line."""

    def __init__(self, part: Part, say: Callable[[str], None]) -> None:
        self._part, self._say = part, say
        self._num_shown = 0  # bytes

    def show(self) -> None:
        """Show complete lines that were not shown yet."""
        if not self._part.log.exists():
            return
        with open(self._part.log, "rb") as log:
            log.seek(self._num_shown)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._num_shown += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._say(f"[{self._part.name}] {line}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
