"""torch's elastic agent for the ranks of one machine, with fleetrun's logs, display and way to end processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext

from torchfleet.base.monitor.json_lines import JsonPipe, readable
from torchfleet.base.monitor.log_file import DEFAULT_BYTES, LogFile
from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.stop_request import REQUEUE
from torchfleet.launch.job_spec import JobSpec, Task, ending_of
from torchfleet.launch.job_watch import JobWatch
from torchfleet.launch.processes import Process, end_all
from torchfleet.launch.rendezvous import Rendezvous
from torchfleet.observe.watch.metrics_ports import port_variables
from torchfleet.observe.watch.watchers import Watching

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Run before the script itself. If the launcher is killed, the kernel ends its ranks (PR_SET_PDEATHSIG). Output is
# appended to the log, which torch itself would truncate at every start.
_BEFORE_THE_SCRIPT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.dup2(os.open(os.devnull, os.O_RDONLY), 0); "
    "log = os.open(os.environ['FLEET_LOG_FILE'], os.O_WRONLY | os.O_APPEND); os.dup2(log, 1); os.dup2(log, 2); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class RankLogs(LogsSpecs):
    """Both streams of rank N go to workerlog.N. torch passes the environment of the ranks through here as well."""

    def __init__(
        self, log_dir: Path, environment: Mapping[str, str], rendezvous: Rendezvous, watching: Watching
    ) -> None:
        super().__init__(str(log_dir))
        self._log_dir, self._environment, self._rendezvous = log_dir, environment, rendezvous
        self._watching, self._pipes = watching, list[JsonPipe]()
        self.begins: dict[Path, int] = {}  # by log: the offset where the output of the latest start begins

    @property
    def root_log_dir(self) -> str:
        return str(self._log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.finish()
        for env in envs.values():
            log = log_of(self._log_dir, env["RANK"])
            if log not in self.begins:
                log.write_bytes(b"")
            self.begins[log] = log.stat().st_size
            status_file_of(self._log_dir, env["RANK"]).unlink(missing_ok=True)
            env.update(
                self._environment,
                **port_variables(self._watching, int(env["LOCAL_RANK"])),
                FLEET_LOG_FILE=str(self._output(log, env["RANK"])),
                FLEET_STATUS_FILE=str(status_file_of(self._log_dir, env["RANK"])),
                TORCHELASTIC_RESTART_COUNT=str(self._rendezvous.num_starts),  # equal on all machines
                TORCHELASTIC_ERROR_FILE="",
            )
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    def _output(self, log: Path, rank: str) -> Path:
        """Return the file that a rank writes to: its log, or a pipe whose lines are converted to JSON."""
        if not self._watching.is_json:
            return log
        pipe = self._log_dir / f".output.rank.{rank}"
        self._pipes.append(JsonPipe(pipe, LogFile(log, True, DEFAULT_BYTES, tell), "rank", int(rank)))
        return pipe

    def finish(self) -> None:
        """Call after the ranks have ended. Blocks until all of their output is in the logs."""
        while self._pipes:
            self._pipes.pop().close()


def log_of(log_dir: Path, rank: int | str) -> Path:
    return log_dir / f"workerlog.{rank}"


def status_file_of(log_dir: Path, rank: int | str) -> Path:
    return log_dir / f".status.rank.{rank}"


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
        codes = [rank.returncode for rank in self._ranks]
        failed = [rank for rank, code in zip(self._ranks, codes, strict=True) if code not in (None, 0)]
        if failed:
            # When one rank is killed, the others fail with errors of their own: report the killed rank as the cause.
            self._fail(next((rank for rank in failed if (rank.returncode or 0) < 0), failed[0]))
        self._echo()
        self._watch.show(self._ranks)
        if not failed and None in codes:  # torch's check would wait 30 s for these if a rank failed just now
            return RunResult(state=WorkerState.HEALTHY)
        result = cast(RunResult, super()._monitor_workers(worker_group))
        if result.state == WorkerState.SUCCEEDED:
            self._logs.finish()
            self._echo(is_last=True)
            self._watch.show_end(self._ranks)
        return result

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
