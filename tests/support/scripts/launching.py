"""fleetrun as the tests start it: its output gathered with times, its processes known, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import psutil
from support import processes

TINY = str(Path(__file__).parent / "tiny.py")
STAND_IN = str(Path(__file__).parent / "stand_in.py")
START = 200.0  # seconds that a job may take to start: torch is imported several times, on few and busy cores
SOON = 60.0  # seconds in which anything has happened that happens at all, on busy cores too
_MARK = "TORCHFLEET_TEST_JOB"  # inherited by everything that a job starts, however deep
_OWN = ("FLEET_", "PADDLE_", "TRAINING_ROLE", "POD_IP", "PSERVER_DEBUG")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without any role in it. Servers are found by their environment, which the system shows
    as it was when a process was started: those that fleetrun's nursery forks have the nursery's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "FLEET_FORK_SERVERS": "0", **more}


class Started:
    """A command and all that it starts; ended, and looked for, when left as a context."""

    _popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen

    def __init__(self, command: Sequence[str], *, folder: Path | None = None, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self._lines: list[str] = []
        with processes.interruptible():
            self.process = type(self)._popen(
                list(command),
                cwd=folder,
                env=clean_environment(**environment, **{_MARK: self._mark}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [] if error else self.left(grace=SOON)
        names = [_described(process) for process in left]
        for process in self.running():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(SOON)
        self._reader.join(10)
        if error:
            print(self.output)  # pytest shows it with the failure
        assert not names, f"left behind: {names}"

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait(self, timeout: float = START) -> int:
        """The exit status, once all output has been read."""
        status = self.process.wait(timeout)
        self._reader.join(SOON)
        return status

    def wait_for(self, text: str, timeout: float = START) -> None:
        """Until this was printed."""
        wait_until(lambda: text in self.output or self.process.poll() is not None, timeout, f"{text!r} in the output")
        wait_until(lambda: text in self.output, SOON, f"{text!r} in the output, but the job ended")

    def running(self) -> list[psutil.Process]:
        """All processes of this job, wherever they hang in the tree of processes; zombies do not count."""
        return processes.with_variable(_MARK, self._mark)

    def left(self, grace: float) -> list[psutil.Process]:
        """What still runs after a grace."""
        deadline = time.monotonic() + grace
        while (found := self.running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def pid(self, role: str, index: int, replica: int | None = None) -> int:
        """The process that has this role, found by its environment. `replica`: of a server; None: any."""
        names = {"SERVER": "FLEET_SERVER_INDEX", "HETER_WORKER": "FLEET_HETER_INDEX"}
        name = names.get(role, "FLEET_WORKER_INDEX")
        for process in self.running():
            with contextlib.suppress(psutil.Error):
                found = processes.environment_of(process)
                is_meant = replica is None or found.get("FLEET_REPLICA", "0") == str(replica)
                if is_meant and found.get("FLEET_ROLE") == role and found.get(name) == str(index):
                    return int(process.pid)
        raise AssertionError(f"no {role} {index} is running")

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.append(line)


class Forked(Started):
    """A Python command whose process, and the Python processes that it starts, need not import torch: see
    `support.processes`."""

    _popen = processes.Popen


def fleetrun(log_dir: Path, *arguments: str, **environment: str) -> Started:
    """For tests of the launcher itself."""
    return Started(_fleetrun(log_dir, arguments), **environment)


def forked_fleetrun(log_dir: Path, *arguments: str, **environment: str) -> Started:
    """For tests of what runs under it."""
    return Forked(_fleetrun(log_dir, arguments), **environment)


def _fleetrun(log_dir: Path, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(log_dir), *arguments]


def run_dir(log_dir: Path) -> Path:
    """The folder of the newest run."""
    return (log_dir / "latest").resolve()


def wait_until(is_so: Callable[[], bool], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < deadline, f"after {timeout:g} s still no {what}"
        time.sleep(0.02)


def in_log(log: Path, text: str) -> Callable[[], bool]:
    return lambda: log.exists() and text in log.read_text()


@contextlib.contextmanager
def seconds() -> Iterator[Callable[[], float]]:
    """How long the block has taken so far."""
    start = time.monotonic()
    yield lambda: time.monotonic() - start


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {process.cmdline()}"
    return str(process.pid)
