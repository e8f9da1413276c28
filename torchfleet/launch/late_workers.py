"""Workers of an elastic job on this machine that join when cores are free, and may leave before the job ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.errors import FleetError
from torchfleet.launch.endurance.loss import leave_for
from torchfleet.launch.job_spec import JobSpec, Report, RunningTask, Start, Task, ending_of, is_late
from torchfleet.launch.processes import start_here
from torchfleet.launch.roles import JobLayout, given_threads
from torchfleet.launch.server_nursery import ServerNursery
from torchfleet.launch.supervisor import JobSupervisor

_PERIOD = 0.5  # seconds between two checks of the free cores
_DONE = 1.0  # seconds without a running first worker after which none joins: a first one may be restarting
_FIRST_PAUSE = 5.0  # seconds before a killed worker joins again; doubled every further time
_LONGEST_PAUSE = 300.0


class LateWorker:
    """Implements RunningTask. It counts as finished while there are no cores for it, and after it has left.

    A killed process counts as running until LateWorkers decides whether the worker has left or has failed.
    """

    def __init__(self, task: Task, log: Path, begin: Callable[[bool], RunningTask]) -> None:
        """`begin`: starts the process; its argument says whether the log is appended to."""
        self.task, self.log, self._begin = task, log, begin
        self._process: RunningTask | None = None
        self._is_final = False  # the end of the process is the end of the task
        self.is_waiting = True
        self.not_before, self._pause = 0.0, _FIRST_PAUSE

    @property
    def num_restarts(self) -> int:
        return self._process.num_restarts if self._process else 0

    @property
    def returncode(self) -> int | None:
        code = self._process.returncode if self._process else 0
        return None if self.was_killed else code

    @property
    def was_killed(self) -> bool:
        """Whether its process was ended by a signal that the supervisor has not sent."""
        return not self._is_final and self._process is not None and (self._process.returncode or 0) < 0

    @property
    def ending(self) -> str:
        """How its process ended."""
        assert self._process
        return ending_of(self._process)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def status(self) -> dict[str, Any]:
        return self._process.status() if self._process else {}

    def last_lines(self, num: int = 20) -> list[str]:
        return self._process.last_lines(num) if self._process else []

    def signal(self, number: int) -> None:
        self._is_final = True
        if self._process:
            self._process.signal(number)

    def restart(self) -> None:
        assert self._process
        self._process.restart()

    def kill(self) -> None:
        self.fail()
        if self._process:
            self._process.kill()

    def close(self) -> None:
        if self._process:
            self._process.close()

    def join(self, append: bool) -> None:
        """Start the process."""
        self._process, self.is_waiting = self._begin(append), False

    def leave(self, is_told: bool) -> None:
        """End the process, if it has not ended, and wait for cores again. `is_told`: LateWorkers ends it;
        otherwise it was killed.
        """
        self.close()
        self._process, self.is_waiting = None, True
        self.not_before = time.monotonic() + self._pause
        self._pause = _FIRST_PAUSE if is_told else min(_LONGEST_PAUSE, 2 * self._pause)

    def fail(self) -> None:
        """Let the supervisor see that the process was killed."""
        self._is_final = True


class LateWorkers:
    """Starts the processes of an elastic job: the first `min_workers` workers at once, later ones as cores allow.

    `start` and `look` are for the supervisor, which calls `look` again and again.
    """

    def __init__(self, job: JobSpec, servers: Sequence[str], log_dir: Path, begin: Start | None = None) -> None:
        """`begin`: starts a process (default: start_here)."""
        self._job, self._servers, self._log_dir = job, servers, log_dir
        self._begin = begin or start_here(job, log_dir)
        self._whole: list[RunningTask] = []  # servers, and workers that run from the beginning
        self._late: list[LateWorker] = []
        self._next = self._needed_at = 0.0
        self._report: Report = lambda line: None

    def start(self, task: Task, report: Report, echo: bool, append: bool) -> RunningTask:
        """Implements Start."""
        self._report = report
        if not is_late(self._job, task):
            self._whole.append(self._begin(task, report, echo, append))
            return self._whole[-1]
        log = self._log_dir / task.log_name
        self._late.append(LateWorker(task, log, lambda again: self._begin(task, report, echo, append or again)))
        return self._late[-1]

    def look(self) -> None:
        """Let workers join or leave. Most calls do nothing. Blocks while it tells servers that a worker has left."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PERIOD
        if any(p.task.role == "worker" and p.returncode is None for p in self._whole):
            self._needed_at = now
        is_needed = now - self._needed_at < _DONE
        for worker in self._late:
            self._consider(worker, is_needed)
        if self._needed_at == now:
            self._fit(usable_cores(), now)

    def _consider(self, worker: LateWorker, is_needed: bool) -> None:
        if worker.was_killed and not is_needed:
            worker.fail()  # the workers that could take over its files have finished
        elif worker.was_killed:
            self._leave(worker, f"{worker.ending}; the others go on", is_told=False)
        elif worker.is_running and not is_needed and not worker.status().get("steps"):
            self._leave(worker, "leaves: the job was done before its first step", is_told=True)
        if not is_needed:
            worker.is_waiting = False

    def _fit(self, num_cores: int, now: float) -> None:
        """Let one worker join or leave if the cores of this machine allow or require it.

        No worker joins while a server has ended: the job is about to end, or the server restarts and takes its core.
        """
        running = [worker for worker in self._late if worker.is_running]
        others = sum(1 if p.task.role == "server" else _threads(p.task) for p in self._whole if p.returncode is None)
        free = num_cores - others - sum(_threads(worker.task) for worker in running)
        may_join = all(p.returncode is None for p in self._whole if p.task.role == "server")
        ready = (worker for worker in self._late if may_join and worker.is_waiting and worker.not_before <= now)
        if free < 0 and running:
            self._leave(running[-1], f"leaves: {num_cores} cores are left on this machine", is_told=True)
        elif (worker := next(ready, None)) is not None and free >= _threads(worker.task):
            self._report(f"[fleetrun] {worker.task.name} joins: {free} of {num_cores} cores are free")
            worker.join(append=worker.not_before > 0)

    def _leave(self, worker: LateWorker, why: str, is_told: bool) -> None:
        self._report(f"[fleetrun] {worker.task.name} {why}")
        worker.leave(is_told)
        if all(p.returncode is not None for p in self._whole if p.task.role == "server"):
            return  # the servers have ended with the job
        try:
            leave_for(worker.task.index, self._job.way, self._servers)
        except FleetError as error:
            self._report(f"[fleetrun] cannot tell the servers: {error}")


def supervisor_of(
    job: JobSpec,
    layout: JobLayout,
    tasks: Sequence[Task],
    log_dir: Path,
    attempt: int,
    nursery: ServerNursery | None = None,
) -> JobSupervisor:
    """Return the supervisor of a job on this machine, elastic or not. `nursery`: forks the servers."""
    begin = start_here(job, log_dir, nursery)
    if job.min_workers is None:
        return JobSupervisor(job, layout, tasks, log_dir, attempt, begin)
    late = LateWorkers(job, layout.servers, log_dir, begin)
    return JobSupervisor(job, layout, tasks, log_dir, attempt, late.start, late.look)


def _threads(task: Task) -> int:
    return given_threads(task.environment) or 1
