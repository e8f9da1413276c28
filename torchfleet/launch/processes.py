"""The processes of a job: each in a process group of its own, with a log and a status file; ended together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from torchfleet.launch.job_spec import Task

_GRACE = 3.0  # seconds between SIGTERM and SIGKILL
# Run before the script itself: should the launcher be killed outright, the kernel ends its children (PR_SET_PDEATHSIG).
_TIE_TO_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"

# The launcher may itself run as a process of a job. Its processes must not inherit that role.
ROLES = {
    "FLEET_ROLE", "FLEET_RESTART", "FLEET_WORKER_INDEX", "FLEET_SERVER_INDEX", "FLEET_WORKER_ENDPOINTS",
    "TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID",
    "PADDLE_TRAINER_ENDPOINTS",
}  # fmt: skip


class LogFile:
    """The log of a process. A disk that is full costs lines of it, and nothing else; `report` is told once."""

    def __init__(self, path: Path, mode: str, report: Callable[[str], None]) -> None:
        self._path, self._report, self._has_told = path, report, False
        self._file: IO[bytes] | None = None
        try:
            self._file = open(path, mode, buffering=0)  # noqa: SIM115  (open as long as the process)
        except OSError as error:
            self._tell(error)

    def write(self, line: bytes) -> None:
        """One line, or as much of it as there is room for."""
        try:
            if self._file is not None:
                self._file.write(line)
                self._has_told = False
        except OSError as error:
            self._tell(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _tell(self, error: OSError) -> None:
        if not self._has_told:
            self._has_told = True
            self._report(f"[fleetrun] {self._path} cannot be written: {error}. Lines of it are lost; the job goes on.")


class Process:
    """A task that was started, its log and its status file."""

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        log_dir: Path,
        echo: Callable[[str], None] | None,
        append: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        """`echo` gets each line of its output; `report` gets what fleetrun itself has to say of it."""
        self.task, self._command, self._log_dir, self._echo, self._report = task, list(command), log_dir, echo, report
        self.log = log_dir / task.log_name
        self.status_file = log_dir / f".status.{task.role}.{task.index}"
        self.num_restarts = 0
        self._start("ab" if append else "wb")

    def _start(self, mode: str) -> None:
        self.status_file.unlink(missing_ok=True)
        around = {name: value for name, value in os.environ.items() if name not in ROLES}
        environment = {**around, **self.task.environment, "FLEET_STATUS_FILE": str(self.status_file)}
        if self.num_restarts:
            environment["FLEET_RESTART"] = str(self.num_restarts)
        self._sink = LogFile(self.log, mode, self._report)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TIE_TO_PARENT, *self._command],
            env=environment,
            stdout=subprocess.PIPE,  # not the log itself: on a full disk a process could print nothing, and would end
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader: threading.Thread | None = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()

    def restart(self) -> None:
        """Start the task again; its log goes on."""
        self.kill()  # what is left of its group
        self.num_restarts += 1
        self._sink.close()
        self._start("ab")

    def kill(self) -> None:
        """Its whole group has ended when this returns."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        if self._reader:
            self._reader.join(timeout=2)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> dict[str, Any]:
        """What the process reported last; empty before its first report."""
        try:
            found = json.loads(self.status_file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def last_lines(self, num: int = 20) -> list[str]:
        """The end of its log."""
        if self._reader:
            self._reader.join(timeout=2)
        try:
            with open(self.log, "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - 16384))
                return log.read().decode(errors="replace").splitlines()[-num:]
        except OSError as error:
            return [f"(the log cannot be read: {error})"]

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group: a worker's own children end with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kill what is left of the process group, and close its files."""
        self.kill()
        self._sink.close()
        self.status_file.unlink(missing_ok=True)

    def _copy_output(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._sink.write(line)
            if self._echo:
                self._echo(line.decode(errors="replace").rstrip("\n"))


def end_all(processes: Sequence[Process]) -> None:
    """SIGTERM to all, and SIGKILL to those that have not ended after a grace. None runs when this returns."""
    for process in processes:
        if process.returncode is None:
            process.signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while any(process.returncode is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        process.close()


def script_command(script: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a training script with this Python."""
    return [sys.executable, script, *arguments]


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]
