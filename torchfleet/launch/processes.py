"""The processes of a job: each has its own process group, log and status file. They are ended together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchfleet.base.monitor.json_lines import JsonLog, LineSplitter, last_lines
from torchfleet.base.monitor.log_file import DEFAULT_BYTES, LogFile, last_bytes
from torchfleet.launch.job_spec import JobSpec, Report, RunningTask, Start, Task
from torchfleet.launch.server_nursery import TIE_TO_PARENT, ServerNursery, Spawned
from torchfleet.launch.surroundings import surroundings

_LINE = 1 << 16  # bytes of output per read
_END = 1 << 15  # bytes at the end of a log that are searched for its last lines
# Seconds after SIGKILL in which the rest of the output is read: the disk may be slow, and a descendant that left the
# process group may keep the output open.
_READING = 10.0
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL


class Sink(Protocol):
    """Receives the output of a process. Only one thread uses it."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Output:
    """Writes the output of a task to its log, as text or as JSON lines; with `echo`, also to the user line by line."""

    def __init__(
        self,
        task: Task,
        log: Path,
        report: Report,
        echo: bool,
        append: bool,
        max_log_bytes: int = DEFAULT_BYTES,
        is_json: bool = False,
    ) -> None:
        self._task, self._report = task, report
        self._file = LogFile(log, append, max_log_bytes, lambda text: report(f"[fleetrun] {text}"))
        self._json = JsonLog(self._file.write, task.role, task.index, task.replica) if is_json else None
        self._shown = LineSplitter() if echo else None

    def write(self, data: bytes) -> None:
        if self._json is not None:
            self._json.write(data)
        else:
            self._file.write(data)
        if self._shown is not None:
            self._show(self._shown.lines(data))

    def close(self) -> None:
        if self._json is not None:
            self._json.end()
        if self._shown is not None:
            self._show(self._shown.end())
        self._file.close()

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._report(f"[{self._task.name}] {line}")


class Process:
    """A started task with its log and its status file."""

    num_restarts = 0
    _killed: float | None = None  # when SIGKILL was first sent
    _status: Any = None  # the last status, and the file that it was read from
    _version: tuple[int, int, int] | None = None
    is_waiting = False  # a local process never waits for resources

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        log_dir: Path,
        report: Report,
        echo: bool = False,
        append: bool = False,
        max_log_bytes: int = DEFAULT_BYTES,
        is_json: bool = False,
        descriptors: Sequence[int] = (),
        nursery: ServerNursery | None = None,
    ) -> None:
        """`report` receives lines for the user: problems, and with `echo` all output. `is_json`: the log is in JSON.
        The process inherits `descriptors` under the same numbers. `nursery`: forks it; only for a server's command."""
        self.task, self._command, self._report, self._echo = task, list(command), report, echo
        self._descriptors, self._nursery = tuple(descriptors), nursery
        self.log, self._max_log_bytes, self._is_json = log_dir / task.log_name, max_log_bytes, is_json
        self.status_file = log_dir / f".status.{task.role}.{task.file_name}"
        self._start(append)

    def _start(self, append: bool) -> None:
        self.status_file.unlink(missing_ok=True)
        self._killed = None
        environment = {**surroundings(), **self.task.environment, "FLEET_STATUS_FILE": str(self.status_file)}
        if self.num_restarts:
            environment["FLEET_RESTART"] = str(self.num_restarts)
        output = self._open_output(append)
        self._process = self._forked(environment) or self._spawned(environment)
        self._reader: threading.Thread | None = threading.Thread(
            target=self._copy_output, args=(self._process, output), daemon=True
        )
        self._reader.start()

    def _forked(self, environment: dict[str, str]) -> Spawned | None:
        return None if self._nursery is None else self._nursery.start(self._command[3:], environment)

    def _spawned(self, environment: dict[str, str]) -> Spawned:
        return subprocess.Popen(
            [sys.executable, "-c", TIE_TO_PARENT, *self._command],
            env=environment,
            stdout=subprocess.PIPE,  # not the log itself: on a full disk a write would fail and end the process
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=self._descriptors,
        )

    def restart(self) -> None:
        """Start the task again. New output is appended to its log."""
        self.kill()  # what is left of its group
        self.num_restarts += 1
        self._start(append=True)

    def kill(self) -> None:
        """Kill the process group. Blocks until the process has ended and its output is read: at most until _READING
        seconds after the first SIGKILL."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        if self._reader and self._killed is not None:
            self._reader.join(max(0.0, self._killed + _READING - time.monotonic()))

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> dict[str, Any]:
        """The last status that the process reported; empty before its first report. The file is read only if
        changed."""
        try:
            found = os.stat(self.status_file)
            version = found.st_ino, found.st_mtime_ns, found.st_size
            if version != self._version:
                self._status = json.loads(self.status_file.read_text())
                self._version = version
        except (OSError, ValueError, RecursionError):
            self._status, self._version = {}, None
        return self._status if isinstance(self._status, dict) else {}

    def last_lines(self, num: int = 20) -> list[str]:
        """The end of its log."""
        if self._reader:
            self._reader.join(timeout=2)
        return last_lines(last_bytes(self.log, _END), num)

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group: a worker's own children end with it."""
        if number == signal.SIGKILL and self._killed is None:
            self._killed = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kill what is left of the process group, and remove its status."""
        self.kill()
        self.status_file.unlink(missing_ok=True)

    def _open_output(self, append: bool) -> Sink:
        return Output(self.task, self.log, self._report, self._echo, append, self._max_log_bytes, self._is_json)

    @staticmethod
    def _copy_output(process: Spawned, output: Sink) -> None:
        assert process.stdout
        with process.stdout as stream, contextlib.closing(output):
            while data := os.read(stream.fileno(), _LINE):
                output.write(data)


def start_here(job: JobSpec, log_dir: Path, nursery: ServerNursery | None = None) -> Start:
    """Return the function that starts a task of the job as a process of this machine. `nursery`: forks the servers."""

    def start(task: Task, report: Report, echo: bool, append: bool) -> Process:
        options = (job.max_log_bytes, job.watching.is_json, job.descriptors)
        forking = nursery if task.role == "server" else None
        return Process(task, job.command_of(task.role), log_dir, report, echo, append, *options, forking)

    return start


def end_all(processes: Sequence[RunningTask]) -> None:
    """Send SIGTERM to all, and SIGKILL to what is left after _GRACE. No process of the groups is left afterwards."""
    for process in processes:
        if process.returncode is None:
            process.signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while any(process.returncode is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:  # all before the first is closed: the time to read their output passes for all at once
        process.signal(signal.SIGKILL)
    for process in processes:
        process.close()


def script_command(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a training script with this Python."""
    return [sys.executable, script, *arguments]


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]
