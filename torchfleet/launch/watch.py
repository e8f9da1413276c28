"""The watch over a job: what one process's end means for the others."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchfleet.errors import FleetError
from torchfleet.launch.display import Display
from torchfleet.launch.processes import Process, end_all
from torchfleet.launch.roles import Layout, Task
from torchfleet.net.keys import KeyFolder
from torchfleet.net.wire import Role
from torchfleet.worker.client.client import Client
from torchfleet.worker.client.connection import Patience

_TOO_LONG = 5.0  # seconds that servers run on after the last worker, or workers after a server, before it is a mistake
_FREE_MODES = ("async", "half_async", "geo")  # no worker waits for another, so one may be missing


class Restarts(NamedTuple):
    """How often a worker is started again; and of the whole job, the how many-th start this is, after the first."""

    max_workers: int = 0
    attempt: int = 0
    max_jobs: int = 0


class Watch:
    """Starts the tasks, and returns the job's exit status when all is over."""

    def __init__(
        self,
        tasks: Sequence[Task],
        command: Sequence[str],
        log_dir: Path,
        layout: Layout,
        restarts: Restarts,
        key_dir: str | None,
    ) -> None:
        self._tasks, self._command, self._log_dir = tasks, command, log_dir
        self._layout, self._restarts, self._key_dir = layout, restarts, key_dir
        self._max_restart = restarts.max_workers
        self.is_finished = False  # all that was left of the job came to its end
        self._processes: list[Process] = []
        self._lost: list[str] = []
        self._signal = 0
        self._odd_since: float | None = None

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, frame: setattr(self, "_signal", received))
        display = Display()
        try:
            return self._run(display)
        finally:
            end_all(self._processes)
            display.close()

    def _run(self, display: Display) -> int:
        first = next((task for task in self._tasks if task.role == "worker"), None)
        for task in self._tasks:
            echo = (lambda line: display.say(f"[{first.name}] {line}")) if first and task is first else None
            self._processes.append(Process(task, self._command, self._log_dir, echo, append=self._restarts.attempt > 0))
        while not self._signal:
            failed = next(
                (p for p in self._processes if p.returncode not in (None, 0) and p.task.name not in self._lost), None
            )
            if failed is not None and not self._go_on_without(failed, display):
                self._tell(failed, display)
                return 1
            odd = self._odd_end(display)
            if odd is not None:
                return odd
            if self._is_over():
                return self._conclude(display)
            display.show(self._processes)
            time.sleep(0.1)
        display.say(f"[fleetrun] {signal.Signals(self._signal).name}: ending {len(self._processes)} processes")
        return 128 + self._signal

    def _odd_end(self, display: Display) -> int | None:
        """Ends that nobody would notice: a server that ended while workers need it, servers that nobody tells to."""
        needing = [p for p in self._of("worker") if p.returncode is None and not p.status().get("left")]
        early = [p for p in self._of("server") if p.returncode == 0] if needing else []
        idle = [p for p in self._of("server") if p.returncode is None] if self._all_workers_ended_here() else []
        if not early and not idle:
            self._odd_since = None
            return None
        self._odd_since = self._odd_since or time.monotonic()
        if time.monotonic() - self._odd_since < _TOO_LONG:
            return None
        if early:
            self._tell(early[0], display)
            return 1
        names = ", ".join(process.task.name for process in idle)
        display.say(f"[fleetrun] all workers have ended, but {names} not: does the script call fleet.stop_worker()?")
        return 1

    def _of(self, role: str) -> list[Process]:
        return [process for process in self._processes if process.task.role == role]

    def _all_workers_ended_here(self) -> bool:
        workers = self._of("worker")
        elsewhere = len(self._layout.workers) > len(self._layout.local_workers)
        return bool(workers) and not elsewhere and all(process.returncode is not None for process in workers)

    def _is_over(self) -> bool:
        """All workers here have ended and so have the servers, which wait for workers elsewhere too."""
        workers = self._of("worker")
        if any(process.returncode is None for process in workers):
            return False
        nobody_is_left = bool(workers) and len(self._lost) == len(workers)  # to tell the servers
        return nobody_is_left or all(process.returncode is not None for process in self._processes)

    def _conclude(self, display: Display) -> int:
        if self._lost and len(self._lost) == len(self._of("worker")):
            display.say(f"[fleetrun] no worker is left; the job ends. Logs in {self._log_dir}")
            return 1
        self.is_finished = True
        display.show_line(self._processes)
        for name in self._lost:
            display.say(f"[fleetrun] {name} was lost on the way; the others finished without it")
        display.say(f"[fleetrun] finished; logs in {self._log_dir}")
        return 1 if self._lost else 0

    def _go_on_without(self, process: Process, display: Display) -> bool:
        """A worker of a free mode is started again (--max_restart), or, if it was killed, done without."""
        mode = process.status().get("mode")
        if process.task.role != "worker" or mode not in _FREE_MODES or self._restarts.max_jobs:
            return False
        code = process.returncode or 0
        if process.num_restarts < self._max_restart:
            display.say(f"[fleetrun] {process.task.name} ended with {code}; starting it again")
            process.restart()
            return True
        if code > 0:
            return False  # the script itself failed, as it would elsewhere
        self._lost.append(process.task.name)
        rest = any(p.returncode is None for p in self._of("worker"))
        then = f"; {mode} training goes on without it" if rest else ""
        display.say(f"[fleetrun] {process.task.name} was killed by {_signal_name(-code)}{then}")
        return self._leave_for(process.task.index, display)

    def _leave_for(self, worker: int, display: Display) -> bool:
        """Tell the servers that this worker will not come back, so that they end with the last of the others."""
        try:
            keys = KeyFolder(self._key_dir) if self._key_dir else None
            endpoints = [f"tcp://{place}" for place in self._layout.servers]
            with Client.connect(
                endpoints, keys, worker=worker, role=Role.LAUNCHER, patience=Patience(5.0, 1)
            ) as client:
                client.leave()
        except FleetError as error:
            display.say(f"[fleetrun] cannot tell the servers: {error}")
            return False
        return True

    def _tell(self, process: Process, display: Display) -> None:
        code = process.returncode or 0
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
        place = ""
        if process.task.role == "server":
            place = f" ({self._layout.servers[process.task.index]})"
        display.say(f"[fleetrun] {process.task.name}{place} {how}; the job ends. Last lines of {process.log}:")
        if process.task.role == "worker" and process.num_restarts < self._max_restart:
            mode = process.status().get("mode", "a job that has not begun")
            display.say(f"[fleetrun] --max_restart acts in {', '.join(_FREE_MODES)}; this is {mode}")
        for line in process.last_lines():
            display.say(f"    {line}")


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in tuple(signal.Signals) else f"signal {number}"
