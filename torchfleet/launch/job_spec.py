"""The description of a job that every launcher receives, of one of its processes, and of a started process."""

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
from torchfleet.base.role.role_info import HETER_WORKER
from torchfleet.observe.watch.watchers import ANY_PORT, Watching
from torchfleet.ps.net.private_jobs import Way


@dataclass(frozen=True)
class Resources:
    """The resources that one process of a role requests from a cluster. None: the cluster or its launcher decides."""

    cpus: float | None = None
    memory: int | None = None  # bytes
    gpus: float | None = None


@dataclass(frozen=True)
class JobSpec:
    """A job as described by the options that all launchers share. The launcher decides where its processes run."""

    command: tuple[str, ...]  # of the script; the environment gives each process its role
    log_dir: Path  # as given by the user; `make_run_dir` creates a folder for each run below it
    num_servers: int | Literal["auto"] | None = None  # None: the user gave no number
    num_workers: int | None = None  # in an elastic job: the maximum
    min_workers: int | None = None  # an elastic job starts with this number; None: not elastic
    resources: Mapping[str, Resources] = field(default_factory=dict)  # by role, only roles with given resources
    folder: Path = field(default_factory=Path.cwd)  # of the script; for a module: the folder where it is searched
    max_restart: int = 0  # restarts of a failed worker; in a collective job, of all ranks together
    max_job_restart: int = 0  # restarts of the whole job
    key_dir: str | None = None
    socket_dir: str | None = None  # folder of the servers' sockets, if all processes are on this machine
    address_book: str | None = None  # of servers that a cluster may restart on another node
    insecure: bool = False
    trace_every: int = 0  # every N-th step is traced; 0: FLEET_TRACE_EVERY decides
    max_log_bytes: int = DEFAULT_BYTES  # of one log file; a process has at most two
    watching: Watching = field(default_factory=Watching)
    server_command: tuple[str, ...] = ()  # of servers that do not need the script; empty: servers run it
    descriptors: tuple[int, ...] = ()  # open files of the launcher that every process on this machine inherits

    def command_of(self, role: str) -> tuple[str, ...]:
        """Return the command of a process of this role."""
        return self.server_command if role == "server" and self.server_command else self.command

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that tell servers and workers where keys or sockets are, or that they run without
        keys, and how much they report."""
        variables = {"FLEET_KEY_DIR": str(Path(self.key_dir).absolute())} if self.key_dir else {}
        if self.socket_dir:
            variables["FLEET_SOCKET_DIR"] = self.socket_dir
        variables |= self.telling_variables
        return {**variables, "FLEET_INSECURE": "1"} if self.insecure else variables

    @property
    def telling_variables(self) -> dict[str, str]:
        """Return the variables that tell processes how much they report."""
        variables = {"FLEET_VERBOSE": "1"} if self.watching.verbose else {}
        return {**variables, "FLEET_TRACE_EVERY": str(self.trace_every)} if self.trace_every else variables

    def resources_of(self, role: str) -> Resources:
        """Return the resources that a process of this role ("server", "worker" or "rank") requests."""
        return self.resources.get(role, Resources())

    @property
    def way(self) -> Way:
        """How clients connect to this job's servers."""
        return Way(self.key_dir, self.socket_dir, self.address_book)

    @property
    def latest(self) -> Path:
        """The link to the folder of the newest run."""
        return self.log_dir / "latest"

    def make_run_dir(self) -> Path:
        """Create a folder for the logs of this run, point `latest` to it, and return its absolute path."""
        name = first = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
        run_dir, number = self.log_dir.absolute() / name, 1
        try:
            while run_dir.exists():  # this process may have made it: a notebook starts several jobs
                number += 1
                name = f"{first}.{number}"
                run_dir = run_dir.with_name(name)
            run_dir.mkdir(parents=True)
        except OSError as error:
            raise RoleError(f"cannot make the folder of logs {run_dir}: {error}") from None
        latest, link = self.latest.absolute(), run_dir.with_name(f".latest.{name}")
        try:
            link.symlink_to(name)
            os.replace(link, latest)  # atomic: a reader of `latest` finds either the old run or the new one
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

    role: str  # "server", "worker", "heter_worker" or "rank"
    index: int
    environment: dict[str, str] = field(default_factory=dict)
    replica: int = 0  # of a server: 1 is the process that starts as the backup

    @property
    def name(self) -> str:
        return name_for_people(self.role, self.index, self.replica)

    @property
    def file_name(self) -> str:
        """The part of file names that identifies this task."""
        return number_in_files(self.index, self.replica)

    @property
    def log_name(self) -> str:
        kind = {"server": "server", HETER_WORKER: "heter"}.get(self.role, "worker")
        return f"{kind}log.{self.file_name}"


Report = Callable[[str], None]  # shows a line to the user


class RunningTask(Protocol):
    """A started task: a process on this machine, or the handle of a process in a cluster.

    No method blocks for long, because the loop that watches all processes calls them.
    """

    @property
    def task(self) -> Task: ...

    @property
    def log(self) -> Path:
        """The path of its log on this machine."""

    @property
    def num_restarts(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it starts or runs; then the exit status, or -N if signal N ended it. -9 also if its machine is
        lost."""

    @property
    def is_waiting(self) -> bool:
        """Whether it counts as finished only because its cluster has no resources for it yet."""

    def status(self) -> dict[str, Any]:
        """The last status that the process reported; empty before its first report."""

    def last_lines(self, num: int = 20) -> list[str]:
        """The end of its log."""

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""

    def restart(self) -> None:
        """Start the task again. New output is appended to its log."""

    def kill(self) -> None:
        """Kill the process and its children. Blocks until they have ended."""

    def close(self) -> None:
        """Kill what is left of the process, and remove its files except the log."""


CAUSE = 0.5  # seconds until the end of a killed process is seen: processes that need it may be seen to fail first


def ending_of(process: RunningTask) -> str:
    """Describe how a process ended: its exit status or its signal."""
    code = process.returncode or 0
    if code >= 0:
        return f"ended with exit status {code}"
    is_known = -code in tuple(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if is_known else f'signal {-code}'}"


def is_late(job: JobSpec, task: Task) -> bool:
    """Whether the task is a worker that joins when there is room for it."""
    return job.min_workers is not None and task.role == "worker" and task.index >= job.min_workers


def keeps_log(task: Task) -> bool:
    """Whether the task is a server that keeps a log on disk."""
    return task.role == "server" and task.environment.get(DURABILITY) == "log"


class Start(Protocol):
    """How a supervisor starts a task."""

    def __call__(self, task: Task, report: Report, echo: bool, append: bool) -> RunningTask:
        """Start `task`. `report` receives lines for the user: problems, and with `echo` all output. `append`: append to
        an existing log."""


def describe_settings(job: JobSpec) -> list[str]:
    """Return the lines of `fleetrun --dry_run` for what the launcher itself does: restarts, logs, displays. Defaults
    get no line."""
    watching, lines = job.watching, []
    if job.max_restart:
        lines.append(f"restarts: of a failed process, {job.max_restart} at most")
    if job.max_job_restart:
        lines.append(f"restarts: of the whole job, {job.max_job_restart} at most")
    if job.max_log_bytes != DEFAULT_BYTES:
        lines.append(f"logs: {job.max_log_bytes:,} bytes each at most")
    if watching.is_json:
        lines.append("logs: JSON lines")
    if watching.verbose:
        lines.append("display: every table of every server")
    if watching.dashboard is not None:
        ports = {ANY_PORT: "its default port, or the next that is free", 0: "any free port"}
        lines.append(f"web page: on {ports.get(watching.dashboard, f'port {watching.dashboard}')}")
    if watching.tensorboard is not None:
        lines.append(f"event files for TensorBoard: in {watching.tensorboard}")
    return lines


def describe_task(task: Task, command: Sequence[str], logs: str) -> list[str]:
    """Return the lines of `fleetrun --dry_run` for one process: its command, its logs and its environment."""
    variables = (f"    {name}={value}" for name, value in task.environment.items())
    return [f"{task.name}: {' '.join(command)}   ({logs})", *variables]
