"""The description of a job that every launcher receives, of one process of it, and of one that was started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.log_file import DEFAULT_BYTES
from torchfleet.base.monitor.snapshot import name_for_people, number_in_files
from torchfleet.base.role.process_settings import DURABILITY
from torchfleet.observe.watch.watchers import Watching
from torchfleet.ps.net.private_jobs import Way


@dataclass(frozen=True)
class Resources:
    """What one process of a role asks a cluster for. None: as the cluster or its launcher decides."""

    cpus: float | None = None
    memory: int | None = None  # bytes
    gpus: float | None = None


@dataclass(frozen=True)
class JobSpec:
    """A job as the options that all launchers share describe it. Where its processes run is up to the launcher."""

    command: tuple[str, ...]  # the same for every process; the environment gives each its role
    log_dir: Path  # as the user gave it; every run has a folder of its own below it: `make_run_dir`
    num_servers: int | Literal["auto"] | None = None  # None: the user gave no number
    num_workers: int | None = None  # of an elastic job: the most
    min_workers: int | None = None  # with so many an elastic job begins; None: not elastic
    resources: Mapping[str, Resources] = field(default_factory=dict)  # by role, of those that are given
    folder: Path = field(default_factory=Path.cwd)  # of the script; of a module: where it is looked for
    max_restart: int = 0  # restarts of a failed worker; in a collective job, of all ranks together
    max_job_restart: int = 0  # restarts of the whole job
    key_dir: str | None = None
    socket_dir: str | None = None  # of the servers, if all processes are on this machine
    address_book: str | None = None  # of servers that a cluster may start again elsewhere
    insecure: bool = False
    trace_every: int = 0  # one step of so many is traced; 0: as FLEET_TRACE_EVERY says
    max_log_bytes: int = DEFAULT_BYTES  # of one file; there are at most two of a process
    watching: Watching = field(default_factory=Watching)
    descriptors: tuple[int, ...] = ()  # open files of this process that every process of this machine inherits

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which servers and workers find keys or sockets, or learn that they go without, and how much
        they are to tell."""
        variables = {"FLEET_KEY_DIR": str(Path(self.key_dir).absolute())} if self.key_dir else {}
        if self.socket_dir:
            variables["FLEET_SOCKET_DIR"] = self.socket_dir
        variables |= self.telling_variables
        return {**variables, "FLEET_INSECURE": "1"} if self.insecure else variables

    @property
    def telling_variables(self) -> dict[str, str]:
        """The variables by which processes learn how much they are to tell."""
        variables = {"FLEET_VERBOSE": "1"} if self.watching.verbose else {}
        return {**variables, "FLEET_TRACE_EVERY": str(self.trace_every)} if self.trace_every else variables

    def resources_of(self, role: str) -> Resources:
        """What a process of this role ("server", "worker" or "rank") asks for."""
        return self.resources.get(role, Resources())

    @property
    def way(self) -> Way:
        """How this job's servers are reached."""
        return Way(self.key_dir, self.socket_dir, self.address_book)

    @property
    def latest(self) -> Path:
        """The link to the folder of the newest run."""
        return self.log_dir / "latest"

    def make_run_dir(self) -> Path:
        """Create a folder of logs for this run alone, let `latest` lead to it, and return its absolute path."""
        name = first = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
        run_dir, number = self.log_dir.absolute() / name, 1
        try:
            while run_dir.exists():  # of this process too: a notebook starts one job after another
                number += 1
                name = f"{first}.{number}"
                run_dir = run_dir.with_name(name)
            run_dir.mkdir(parents=True)
        except OSError as error:
            raise RoleError(f"cannot make the folder of logs {run_dir}: {error}") from None
        latest, link = self.latest.absolute(), run_dir.with_name(f".latest.{name}")
        try:
            link.symlink_to(name)
            os.replace(link, latest)  # in one step: whoever reads `latest` finds the one run or the other
        except OSError as error:
            link.unlink(missing_ok=True)
            raise RoleError(
                f"cannot make {latest} a link to the logs of this run: {error}. Remove what is there, or give another "
                "--log_dir."
            ) from None
        return run_dir


@dataclass
class Task:
    """One process of a job."""

    role: str  # "server", "worker" or "rank"
    index: int
    environment: dict[str, str] = field(default_factory=dict)
    replica: int = 0  # of a server: 1 is the process that begins as the backup

    @property
    def name(self) -> str:
        return name_for_people(self.role, self.index, self.replica)

    @property
    def file_name(self) -> str:
        """What tells its files from those of others."""
        return number_in_files(self.index, self.replica)

    @property
    def log_name(self) -> str:
        return f"{'server' if self.role == 'server' else 'worker'}log.{self.file_name}"


Report = Callable[[str], None]  # shows a line to the user


class RunningTask(Protocol):
    """A task that was started: a process of this machine, or something of a cluster that runs one elsewhere.

    No method waits for long: the loop that watches all processes calls them.
    """

    @property
    def task(self) -> Task: ...

    @property
    def log(self) -> Path:
        """Where its output is, on this machine."""

    @property
    def num_restarts(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it starts or runs; the exit status, or -N if signal N ended it; -9 also if its machine is lost."""

    @property
    def is_waiting(self) -> bool:
        """Whether it counts as done only until its cluster has room for it."""

    def status(self) -> dict[str, Any]:
        """What the process reported last; empty before its first report."""

    def last_lines(self, num: int = 20) -> list[str]:
        """The end of its log."""

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""

    def restart(self) -> None:
        """Start the task again; its log goes on."""

    def kill(self) -> None:
        """It and its children have ended when this returns."""

    def close(self) -> None:
        """Kill what is left of it, and remove what it leaves beside its log."""


def ending_of(process: RunningTask) -> str:
    """How it ended, in words: its exit status or its signal."""
    code = process.returncode or 0
    if code >= 0:
        return f"ended with exit status {code}"
    is_known = -code in tuple(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if is_known else f'signal {-code}'}"


def keeps_log(task: Task) -> bool:
    """Whether it is a server whose changes are on disk."""
    return task.role == "server" and task.environment.get(DURABILITY) == "log"


class Start(Protocol):
    """How a supervisor starts a task."""

    def __call__(self, task: Task, report: Report, echo: bool, append: bool) -> RunningTask:
        """`report` takes lines for the user: complaints, and with `echo` all output. `append`: the log goes on."""


def describe_task(task: Task, command: Sequence[str], logs: str) -> list[str]:
    """The lines of `fleetrun --dry_run` for one process: what is run, where its logs go, its environment."""
    variables = (f"    {name}={value}" for name, value in task.environment.items())
    return [f"{task.name}: {' '.join(command)}   ({logs})", *variables]
