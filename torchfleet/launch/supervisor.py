"""Starts the processes of a job with servers, watches them, and decides what the end of one means for all."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.freshness import advice, summed
from torchfleet.base.pages import page
from torchfleet.base.role.role_info import HETER_WORKER
from torchfleet.launch.endurance.loss import leave_for, tell_of_loss
from torchfleet.launch.endurance.starting import Starting
from torchfleet.launch.endurance.worker_loss import FREE_MODES, may_be_missed, may_restart
from torchfleet.launch.job_spec import CAUSE, JobSpec, RunningTask, Start, Task, ending_of, is_late, keeps_log
from torchfleet.launch.job_watch import JobWatch
from torchfleet.launch.processes import end_all, start_here
from torchfleet.launch.roles import JobLayout
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.replica_channels import SEPARATOR

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # these end a job
_PAUSE = 0.1  # seconds between two polls of the processes
_QUICK = 0.02  # the same for servers with backups: a backup waits for the message that its primary has ended
_TOO_LONG = 5.0  # seconds that servers may outlive the last worker, or workers a server, before the job fails
_STOPPING = 60.0  # seconds that servers may outlive workers that have all left: they were told to stop
# The mode whose workers restart together, unless --on_worker_loss says that the others go on or wait.
_TOGETHER = "hybrid"


def _blame(process: RunningTask) -> tuple[int, bool]:
    """Sort key: a killed process comes first; a process that failed because it waited for another in vain, last."""
    return min(process.returncode or 0, 1), bool(process.status().get("waited_in_vain"))


class JobSupervisor:
    """One attempt to run the tasks of a job. `attempt` counts from 0: the earlier attempts failed.

    `start`: starts a task anywhere; None: as a process of this machine. `look`: called again and again while the job
    runs.
    """

    def __init__(
        self,
        job: JobSpec,
        layout: JobLayout,
        tasks: Sequence[Task],
        log_dir: Path,
        attempt: int = 0,
        start: Start | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._layout, self._tasks, self._log_dir = job, layout, tasks, log_dir
        self._attempt, self._start, self._look = attempt, start or start_here(job, log_dir), look
        self.is_finished = False  # every process except lost workers has ended with status 0
        self._processes: list[RunningTask] = []
        self._lost: list[str] = []  # names of killed workers without which the job continues
        self._signal = 0  # the signal that the launcher received
        self._odd_since: float | None = None  # since when servers run without workers, or workers without a server

    def run(self) -> int:
        """Start the tasks, block until the job has ended and return its exit status. No process is left running.

        SIGINT and SIGTERM end the job if this is the main thread. Their previous handlers are restored afterwards.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._stop) for number in _SIGNALS} if is_main else {}
        try:
            with (
                contextlib.closing(JobWatch(self._job, self._log_dir, self._attempt)) as watch,
                contextlib.closing(Starting(self._job.way, self._layout.servers)) as starting,
            ):
                try:
                    return self._run(watch, starting)
                finally:
                    end_all(self._processes)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _run(self, watch: JobWatch, starting: Starting) -> int:
        first = next((task for task in self._tasks if task.role != "server"), None)
        for task in self._tasks:
            append = self._attempt > 0  # the logs of all attempts are kept
            self._processes.append(self._start(task, watch.report, task is first, append))
        pause = _QUICK if self._layout.local_backups or len(self._layout.places) > len(self._layout.servers) else _PAUSE
        while not self._signal:
            self._look()
            self._end_followers()
            failed = self._first_failed()
            if failed is not None and not self._go_on_without(failed, watch):
                self._report_failure(failed, watch)
                return 1
            odd = self._odd_end(watch)
            if odd is not None:
                return odd
            if self._is_over():
                return self._conclude(watch)
            starting.look(self._restarted())
            watch.show(self._processes)
            time.sleep(pause)
        watch.report(f"[fleetrun] {signal.Signals(self._signal).name}: ending {len(self._processes)} processes")
        return 128 + self._signal

    def _first_failed(self) -> RunningTask | None:
        """Return the process whose failure made others fail, or None. Blocks for CAUSE seconds if a process failed by
        itself: connections of a killed process are closed before its end is seen, and its peers may end first."""
        failed = self._failed()
        if failed is None or (failed.returncode or 0) <= 0:
            return failed
        time.sleep(CAUSE)
        return self._failed()

    def _failed(self) -> RunningTask | None:
        """Return a failed process, preferably a killed one: the others failed because they needed it."""
        ended = [p for p in self._processes if p.returncode not in (None, 0) and p.task.name not in self._lost]
        ended += [p for p in self._of("server") if p.returncode == 0 and self._partner(p) and self._needing()]
        if not self._needing():  # a replica ended after its partner finished has not failed
            ended = [p for p in ended if not self._has_finished(self._partner(p))]
        return min(ended, key=_blame, default=None)

    def _odd_end(self, watch: JobWatch) -> int | None:
        """Return the exit status if a server that workers need has ended, or if servers are left that no worker will
        stop."""
        serving = [*self._of("server"), *self._of(HETER_WORKER)]
        early = [p for p in serving if p.returncode == 0] if self._needing() else []
        idle = [p for p in self._of("server") if p.returncode is None] if self._all_workers_ended_here() else []
        if not early and not idle:
            self._odd_since = None
            return None
        self._odd_since = self._odd_since or time.monotonic()
        were_told = not early and self._all_have_left()
        if time.monotonic() - self._odd_since < (_STOPPING if were_told else _TOO_LONG):
            return None
        if early:
            self._report_failure(early[0], watch)
            return 1
        if self._has_no_member():
            return self._refuse_script(watch)
        names = ", ".join(process.task.name for process in idle)
        why = f"after {_STOPPING:g} s" if were_told else "does the script call fleet.stop_worker()?"
        watch.report(f"[fleetrun] all workers have ended, but {names} not: {why}")
        return 1

    def _all_have_left(self) -> bool:
        """Whether all workers that ended with status 0 had told the servers that they leave. Late workers without a
        process are not counted: the launcher has ended their process, or has not started one."""
        finished = [p for p in self._of("worker") if p.returncode == 0]
        statuses = [p.status() for p in finished if p.status() or not is_late(self._job, p.task)]
        return bool(statuses) and all(status.get("left") for status in statuses)

    def _needing(self) -> list[RunningTask]:
        """Return the workers of this machine that need servers."""
        return [p for p in self._of("worker") if p.returncode is None and not p.status().get("left")]

    def _restarted(self) -> list[tuple[int, int]]:
        """Return the workers of this machine that were started again and have not joined yet, each with its number of
        restarts."""
        workers = (p for p in self._of("worker") if p.num_restarts and p.returncode is None and not p.status())
        return [(p.task.index, p.num_restarts) for p in workers]

    def _partner(self, process: RunningTask) -> RunningTask | None:
        """Return the other replica of a server, if it runs on this machine."""
        task = process.task
        found = (p for p in self._of("server") if p.task.index == task.index and p.task.replica != task.replica)
        return next(found, None) if task.role == "server" else None

    @staticmethod
    def _has_finished(process: RunningTask | None) -> bool:
        return process is not None and process.returncode == 0

    def _end_followers(self) -> None:
        """End the backups of servers that have finished: a backup may take long to notice."""
        for process in self._of("server"):
            if process.returncode is None and not self._needing() and self._has_finished(self._partner(process)):
                process.signal(signal.SIGTERM)

    def _of(self, role: str) -> list[RunningTask]:
        return [process for process in self._processes if process.task.role == role]

    def _all_workers_ended_here(self) -> bool:
        workers = self._of("worker")
        elsewhere = len(self._layout.workers) > len(self._layout.local_workers)
        return bool(workers) and not elsewhere and all(process.returncode is not None for process in workers)

    def _is_over(self) -> bool:
        """Whether all processes here have ended. Servers wait for the workers of all machines, so they end last. Heter
        workers of a machine with workers or servers need not end: one may have been started after workers left."""
        workers = self._of("worker")
        if any(process.returncode is None for process in workers):
            return False
        no_worker_is_left = bool(workers) and len(self._lost) == len(workers)  # so no worker can stop the servers
        lasting = [p for p in self._processes if p.task.role != HETER_WORKER] or self._processes
        return no_worker_is_left or all(process.returncode is not None for process in lasting)

    def _conclude(self, watch: JobWatch) -> int:
        """Report how the job ended, and return its exit status."""
        if self._lost and len(self._lost) == len(self._of("worker")):
            watch.report(f"[fleetrun] no worker is left; the job ends. Logs in {self._log_dir}")
            return 1
        self.is_finished = True
        if self._has_no_member():
            return self._refuse_script(watch)
        watch.show_end(self._processes)
        for name in self._lost:
            watch.report(f"[fleetrun] {name} was lost on the way; the others finished without it")
        old = advice(summed(process.status().get("staleness_dense", {}) for process in self._of("server")))
        if old:
            watch.report(f"[fleetrun] {old}")
        watch.report(f"[fleetrun] finished; logs in {self._log_dir}")
        return 1 if self._lost else 0

    def _has_no_member(self) -> bool:
        """Whether no process of this machine has become a server or a worker of the job: each reports when it does.
        Ranks need not: a script may use torch.distributed alone.
        """
        members = [*self._of("server"), *self._of("worker")]
        return bool(members) and not any(process.status() for process in members)

    def _refuse_script(self, watch: JobWatch) -> int:
        """Report that the script takes no part in the job, and return the exit status."""
        num = len(self._processes)
        times = "once" if num == 1 else f"{num} times, each time by itself"
        watch.report(
            f"[fleetrun] warning: no process has joined the job: the script ran {times}. A script of a job with "
            "servers calls fleet.init(), and then fleet.init_worker() or fleet.run_server(), or fleet.prepare() "
            f"({page('launch')}). Without them, start it with python instead of fleetrun. "
            f"Logs in {self._log_dir}"
        )
        return 1

    def _go_on_without(self, process: RunningTask, watch: JobWatch) -> bool:
        """Restart a failed process (--max_restart), or give a worker up if the others can continue without it. Returns
        whether the job continues."""
        if process.task.role in ("server", HETER_WORKER):
            return self._restart_serving(process, watch)
        mode = process.status().get("mode", "")
        is_together = mode == _TOGETHER and not may_restart(mode, process.task.environment)
        if is_together and not self._job.max_job_restart:
            return self._restart_workers(process, watch)
        is_free = not mode and is_late(self._job, process.task)  # it failed before it could report its mode
        # A worker that waited for another in vain would train everything again, and wait for the same worker again.
        is_final = self._job.max_job_restart or process.status().get("waited_in_vain")
        if is_final or not (is_free or may_restart(mode, process.task.environment)):
            return False
        code = process.returncode or 0
        if process.num_restarts < self._job.max_restart:
            watch.report(f"[fleetrun] {process.task.name} ended with {code}; starting it again")
            process.restart()
            return True
        if not may_be_missed(code, process.task.environment):
            return False
        self._lost.append(process.task.name)
        rest = any(p.returncode is None for p in self._of("worker"))
        then = f"; {mode or 'elastic'} training goes on without it" if rest else ""
        watch.report(f"[fleetrun] {process.task.name} {ending_of(process)}{then}")
        return self._leave_for(process.task.index, watch) or is_free

    def _restart_serving(self, process: RunningTask, watch: JobWatch) -> bool:
        """Restart a server or heter worker, if the job can go on with a new process."""
        if process.task.role == HETER_WORKER:
            return self._restart_heter(process, watch)
        return self._replace_server(process, watch) or self._restart_server(process, watch)

    def _replace_server(self, process: RunningTask, watch: JobWatch) -> bool:
        """Restart a killed or deposed server as the backup of its other replica, which continues.

        Returns False if no other replica runs, or if the script failed: it would fail again.
        """
        task, places = process.task, self._layout.servers[process.task.index].split(SEPARATOR)
        partner = self._partner(process)
        is_alone = len(places) == 1 or (partner is not None and partner.returncode is not None)
        if is_alone or ((process.returncode or 0) > 0 and not process.status().get("deposed")):
            return False
        keys = KeyFolder(self._job.key_dir) if self._job.key_dir else None
        other = self._job.way.endpoint(places[1 - task.replica])
        tell_of_loss(other, keys, task.index, task.replica, process.num_restarts)
        watch.report(f"[fleetrun] {task.name} {ending_of(process)}; the other replica goes on, and a new backup starts")
        process.restart()
        return True

    def _restart_server(self, process: RunningTask, watch: JobWatch) -> bool:
        """Restart a server that keeps a log. It recovers all acknowledged changes; workers wait for it."""
        if not keeps_log(process.task) or process.num_restarts >= self._job.max_restart or self._job.max_job_restart:
            return False
        number = f"{process.num_restarts + 1} of {self._job.max_restart}"
        watch.report(
            f"[fleetrun] {process.task.name} {ending_of(process)}; starting it again from its log ({number}). "
            "Workers wait."
        )
        process.restart()
        return True

    def _restart_heter(self, process: RunningTask, watch: JobWatch) -> bool:
        """Restart a heter worker that was killed while it served: it has no state, and workers use others meanwhile.

        A heter worker that failed by itself is restarted as often as --max_restart says.
        """
        was_killed = (process.returncode or 0) < 0 and bool(process.status())
        if not was_killed and process.num_restarts >= self._job.max_restart:
            return False
        watch.report(f"[fleetrun] {process.task.name} {ending_of(process)}; starting it again")
        process.restart()
        return True

    def _restart_workers(self, failed: RunningTask, watch: JobWatch) -> bool:
        """Restart all workers while the servers keep their rows. Returns False if that is not allowed, or if a
        worker has left."""
        workers = self._of("worker")
        elsewhere = len(self._layout.workers) > len(workers)
        if elsewhere or any(p.num_restarts >= self._job.max_restart or p.status().get("left") for p in workers):
            return False
        watch.report(f"[fleetrun] {failed.task.name} {ending_of(failed)}; starting all workers again")
        for worker in workers:  # end all before starting any: a new worker must not talk to an old one
            worker.kill()
        for worker in workers:
            worker.restart()
        return True

    def _leave_for(self, worker: int, watch: JobWatch) -> bool:
        try:
            leave_for(worker, self._job.way, self._layout.servers)
        except FleetError as error:
            watch.report(f"[fleetrun] cannot tell the servers: {error}")
            return False
        return True

    def _report_failure(self, process: RunningTask, watch: JobWatch) -> None:
        address = ""
        if process.task.role == "server":
            address = f" ({self._layout.servers[process.task.index]})"
        elif process.task.role == HETER_WORKER:
            address = f" ({self._layout.heters[process.task.index]})"
        watch.report(
            f"[fleetrun] {process.task.name}{address} {ending_of(process)}; the job ends. Last lines of {process.log}:"
        )
        if keeps_log(process.task) and not self._job.max_job_restart:
            watch.report(
                f"[fleetrun] a server that keeps a log is started again as often as --max_restart says: "
                f"{self._job.max_restart} times"
            )
        if process.task.role == "worker" and process.num_restarts < self._job.max_restart:
            mode = process.status().get("mode", "a job that has not begun")
            text = f"acts in {', '.join(FREE_MODES)}, {_TOGETHER}, and sync with --on_worker_loss; this is {mode}"
            if mode == _TOGETHER:
                text = f"acts in {mode} mode on one machine, and as long as no worker has left"
            watch.report(f"[fleetrun] --max_restart {text}")
        for line in process.last_lines():
            watch.report(f"    {line}")
