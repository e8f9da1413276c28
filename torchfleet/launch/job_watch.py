"""Passes the events of a job to all of its watchers: the display, the record of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.snapshot import JobSnapshot, RatesOfNow, RoleSnapshot
from torchfleet.launch.job_spec import JobSpec, RunningTask
from torchfleet.observe.dashboard.dashboard_watcher import DashboardWatcher
from torchfleet.observe.watch.display import Display
from torchfleet.observe.watch.history import HistoryWriter
from torchfleet.observe.watch.json_display import WARNING, JsonDisplay
from torchfleet.observe.watch.tensorboard_events import TensorBoardEvents
from torchfleet.observe.watch.watchers import Watcher

_PERIOD = 0.5  # seconds between two reads of the statuses
# Raised for a malformed status or a full disk. Not every Exception: a signal handler may raise its own.
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, OSError)


class JobWatch:
    """Watches a job until it is closed. `report` shows a line at once; any thread may call it."""

    def __init__(self, job: JobSpec, run_dir: Path, attempt: int = 0, shows: bool = True) -> None:
        """`shows`: False to record the job without showing it. If this raises FleetError, nothing stays open."""
        watching = job.watching
        self._watchers: list[Watcher] = [HistoryWriter(run_dir, job.command, attempt)]
        self._display: Watcher | None = None
        if shows:
            self._display = (
                JsonDisplay(run_dir, self._warn) if watching.is_json else Display(run_dir, watching.verbose, self._warn)
            )
            self._watchers.insert(0, self._display)
        self._next, self._rates = 0.0, RatesOfNow()
        try:
            if watching.tensorboard is not None:
                self._watchers.append(TensorBoardEvents(Path(watching.tensorboard) / run_dir.name, job.command))
            if watching.dashboard is not None:  # after the record: the dashboard sends its last lines
                self._watchers.append(DashboardWatcher(run_dir, watching.dashboard, attempt, self.report))
        except BaseException:
            self.close()
            raise

    def report(self, line: str) -> None:
        """Show a line of the launcher or of a process."""
        self._each(lambda watcher: watcher.note(line, line.startswith("[fleetrun]")))

    def _warn(self, text: str) -> None:
        """Record a warning that the display has already shown."""

        def record(watcher: Watcher) -> None:
            if watcher is not self._display:
                watcher.note(f"{WARNING}{text}", True)

        self._each(record)

    def show(self, processes: Sequence[RunningTask]) -> None:
        """Show the state of the job. Called several times a second; statuses are read less often."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PERIOD
        snapshot = self._rates.of(snapshot_of(processes))
        self._each(lambda watcher: watcher.look(snapshot))

    def show_end(self, processes: Sequence[RunningTask]) -> None:
        """Show the end of a job that has finished."""
        snapshot = self._rates.of(snapshot_of(processes))
        self._each(lambda watcher: watcher.end(snapshot))

    def close(self) -> None:
        self._each(lambda watcher: watcher.close())

    def _each(self, act: Callable[[Watcher], None]) -> None:
        """Call `act` on each watcher. A watcher that raises is reported and removed; the job continues."""
        for watcher in tuple(self._watchers):
            try:
                act(watcher)
            except _FAULTS as error:
                if watcher in self._watchers:  # a line from another watcher may have removed it already
                    self._watchers.remove(watcher)
                tell(f"[fleetrun] {type(watcher).__name__} ends: {error!r:.500}. The job goes on without it.")


def snapshot_of(processes: Sequence[RunningTask]) -> JobSnapshot:
    return JobSnapshot(time.time(), [_role(process) for process in processes])


def _role(process: RunningTask) -> RoleSnapshot:
    task, code, status = process.task, process.returncode, process.status()
    ended = "waiting" if process.is_waiting else "failed" if code else "done"
    state = ("running" if status else "starting") if code is None else ended
    return RoleSnapshot(
        task.role, task.index, state, status, task.replica, code, process.num_restarts, process.log.name
    )
