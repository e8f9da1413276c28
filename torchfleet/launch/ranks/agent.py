"""torch's elastic agent for the ranks of one machine, with fleetrun's logs, display and way to end processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from torchfleet.base.monitor.json_lines import readable
from torchfleet.base.monitor.stop_request import REQUEUE
from torchfleet.launch.job_spec import CAUSE, JobSpec, Task, ending_of
from torchfleet.launch.job_watch import JobWatch
from torchfleet.launch.processes import Process, end_all
from torchfleet.launch.ranks.rank_logs import RankLogs, log_of, status_file_of
from torchfleet.launch.ranks.rendezvous import RankStoreLost, Rendezvous
from torchfleet.launch.ranks.standby import Standby

_LOOK = 2.0  # seconds between two checks whether ranks can be replaced
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Run before the script itself. If the launcher is killed, the kernel ends its ranks (PR_SET_PDEATHSIG). Output is
# appended to the log, which torch itself would truncate at every start.
_BEFORE_THE_SCRIPT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.dup2(os.open(os.devnull, os.O_RDONLY), 0); "
    "log = os.open(os.environ['FLEET_LOG_FILE'], os.O_WRONLY | os.O_APPEND); os.dup2(log, 1); os.dup2(log, 2); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Rank(Process):
    """A process that torch's agent has started."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log_dir: Path) -> None:
        self.task = Task("rank", rank)
        self.log, self.status_file = log_of(log_dir, rank), status_file_of(log_dir, rank)
        self._process, self._reader = process, None

    def status(self) -> dict[str, Any]:
        """Never empty: a rank counts as running from the start, even if its script reports nothing."""
        return {"role": "rank", **super().status()}


class Tail:
    """Reads the lines that are appended to a log after the offset `begin`."""

    def __init__(self, log: Path, begin: int) -> None:
        self._file = open(log, "rb")  # noqa: SIM115  (stays open while the process runs)
        self._file.seek(begin)
        self._rest = b""

    def lines(self, is_last: bool = False) -> Iterator[str]:
        """Yield the lines completed since the last call; with `is_last`, also a last line without a newline."""
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        if is_last and self._rest:
            whole.append(self._rest)
            self._rest = b""
        for line in whole:
            yield readable(line.decode(errors="replace"))


class Agent(LocalElasticAgent):
    """Starts the ranks, watches them and restarts them, as torch's agent does, and shows what happens."""

    def __init__(self, job: JobSpec, num_ranks: int, logs: RankLogs, rendezvous: Rendezvous, watch: JobWatch) -> None:
        command = ("-c", _BEFORE_THE_SCRIPT, *job.command)
        arguments = tuple(argument.replace("$", "$$") for argument in command)  # torch expands macros after a $
        spec = WorkerSpec(
            "worker", num_ranks, rendezvous, entrypoint=sys.executable, args=arguments,
            max_restarts=job.max_restart, monitor_interval=0.1,
        )  # fmt: skip
        super().__init__(spec, logs)
        self._rendezvous_handler, self._watch, self._logs = rendezvous, watch, logs
        self._ranks: list[Rank] = []
        self._command, self._standby = job.command, Standby(logs.environment)
        self._next_look = 0.0  # when to check again whether a process in reserve is of use
        self._tail: Tail | None = None
        self.failure = ""  # why the job ended
        self.wants_requeue = False  # a rank saved a checkpoint because the job was asked to end

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        handlers = cast(SubprocessContext, self._pcontext).subprocess_handlers
        log_dir = Path(self._logs.root_log_dir)
        self._ranks = [
            Rank(worker.global_rank, handlers[worker.local_rank].proc, log_dir) for worker in worker_group.workers
        ]
        self._tail = Tail(self._ranks[0].log, self._logs.begins[self._ranks[0].log])
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        known = [rank.returncode or 0 for rank in self._ranks]
        if max(known) > 0 and min(known) == 0:  # a killed rank closes its connections before its end is seen
            time.sleep(CAUSE)
        codes = [rank.returncode for rank in self._ranks]
        failed = [rank for rank, code in zip(self._ranks, codes, strict=True) if code not in (None, 0)]
        if failed and self._replace(failed):
            return RunResult(state=WorkerState.HEALTHY)
        if failed:
            # When one rank is killed, the others fail with errors of their own: report the killed rank as the cause.
            self._fail(next((rank for rank in failed if (rank.returncode or 0) < 0), failed[0]))
        self._echo()
        self._watch.show(self._ranks)
        self._keep_standby()
        if not failed and None in codes:  # torch's check would wait 30 s for these if a rank failed just now
            return RunResult(state=WorkerState.HEALTHY)
        result = cast(RunResult, super()._monitor_workers(worker_group))
        if result.state == WorkerState.SUCCEEDED:
            self._logs.finish()
            self._echo(is_last=True)
            self._watch.show_end(self._ranks)
        return result

    def _replace(self, failed: Sequence[Rank]) -> bool:
        """Start only the failed ranks again, if the others can go on with them. Returns whether they can.

        The script must be in fleet.elastic.run: its ranks then meet the new ones. A rank that has finished, or that
        wants the job to be queued again, does not meet them.
        """
        cannot = any(rank.returncode in (0, REQUEUE) for rank in self._ranks)
        if cannot or not self._remaining_restarts:
            return False
        try:
            with self._rendezvous_handler.rank_attempts(self._num_ranks) as attempts:
                if not attempts.may_go_on():
                    return False
                attempts.begin_next()  # before new processes start: they join the next attempt
        except RankStoreLost:
            return False
        most = self._worker_group.spec.max_restarts
        self._remaining_restarts -= 1
        for rank in failed:
            self._watch.report(
                f"[fleetrun] {rank.task.name} {ending_of(rank)}; starting it again, the other ranks wait for it "
                f"({most - self._remaining_restarts} of {most})"
            )
            self._start_again(self._ranks.index(rank))
        return True

    def _keep_standby(self) -> None:
        """Keep a process in reserve while ranks can be replaced."""
        if self._remaining_restarts and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK
            with (
                contextlib.suppress(RankStoreLost),
                self._rendezvous_handler.rank_attempts(self._num_ranks) as attempts,
            ):
                if attempts.may_go_on():
                    self._standby.prepare()

    @property
    def _num_ranks(self) -> int:
        """Of the whole job."""
        return int(self._worker_group.workers[0].world_size)

    def _start_again(self, local_rank: int) -> None:
        rank, context = self._ranks[local_rank], cast(SubprocessContext, self._pcontext)
        rank.kill()  # what is left of its process group
        self._logs.renew(str(rank.task.index))
        environment = {**os.environ, **context.envs[local_rank]}
        process = self._standby.take(self._command, environment) or subprocess.Popen(
            [str(context.entrypoint), *context.args[local_rank]],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        context.subprocess_handlers[local_rank].proc = process
        self._worker_group.workers[local_rank].id = process.pid
        self._ranks[local_rank] = Rank(rank.task.index, process, Path(self._logs.root_log_dir))

    def _fail(self, rank: Rank) -> None:
        self._end_ranks()
        report, most = self._watch.report, self._worker_group.spec.max_restarts
        what = f"{rank.task.name} {ending_of(rank)}"
        if self._remaining_restarts:
            report(f"[fleetrun] {what}; starting all ranks again ({most - self._remaining_restarts + 1} of {most})")
            return
        self.failure, self.wants_requeue = what, rank.returncode == REQUEUE
        report(f"[fleetrun] {what}; the job ends. Last lines of {rank.log}:")
        for line in rank.last_lines():
            report(f"    {line}")

    def _echo(self, is_last: bool = False) -> None:
        """Show the new output of the first rank of this machine."""
        for line in self._tail.lines(is_last) if self._tail else ():
            self._watch.report(f"[{self._ranks[0].task.name}] {line}")

    def _end_ranks(self) -> None:
        """End the ranks and their children within seconds. Signals that arrive meanwhile are handled afterwards."""
        with _held_back(SIGNALS):
            self._standby.close()
            end_all(self._ranks)
            self._logs.finish()
            self._echo(is_last=True)

    def _shutdown(self, *arguments: Any, **more: Any) -> None:
        self._end_ranks()
        super()._shutdown(*arguments, **more)

    def _exit_barrier(self) -> None:
        self._rendezvous_handler.finish()


@contextlib.contextmanager
def _held_back(signals: Sequence[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
