"""The actor on a Ray node: starts the script of one role as a child process and reports its state."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torchfleet.base.errors import RoleError
from torchfleet.launch.job_spec import Task
from torchfleet.launch.processes import Process, Sink
from torchfleet.ps.net.addresses import write_book

FUNCTION = "FLEET_RAY_FUNCTION"  # the file with the function that a process calls; the result is written next to it
RESULT = ".result"
_MOST_OUTPUT = 16 << 20  # bytes buffered for the driver; older output is dropped
_IN_MEMORY = "/dev/shm"  # a folder in memory, not on a disk
_PREFIX = "torchfleet-ray-"  # of folder names; the process id follows
_LOST = b"\n[fleetrun] output was lost here: more than could be sent\n"


@dataclass(frozen=True)
class Work:
    """What an actor runs."""

    task: Task
    command: tuple[str, ...]  # without the interpreter: the node's own is used
    script: str  # a file that must exist, relative to the actor's folder; "": none
    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # contents of the key files, by name
    moved: Mapping[str, str] = field(default_factory=dict)  # servers that moved: first address → current address
    function: bytes = field(default=b"", repr=False)  # the pickled function of fleet.ray.run


@dataclass(frozen=True)
class Look:
    """The state of a process. `start`: the number of the start; 0: nothing was started."""

    start: int
    returncode: int | None
    status: dict[str, Any]
    output: bytes


class Outbox:
    """Buffers output of a process for the driver. Implements Sink: closed when the process has closed its streams."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._data, self._closed = bytearray(), False

    def write(self, data: bytes) -> None:
        with self._changed:
            self._data += data
            if len(self._data) > _MOST_OUTPUT:
                self._data[: _MOST_OUTPUT // 2] = _LOST
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, timeout: float) -> bytes:
        """Return the output since the last call. Blocks until there is output or the end, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._data or self._closed, timeout)
            taken = bytes(self._data)
            self._data.clear()
            return taken


class _NodeProcess(Process):
    def _open_output(self, append: bool) -> Sink:
        self.outbox = Outbox()
        return self.outbox


class Node:
    """The actor of one role. Its methods may be called concurrently."""

    def __init__(self) -> None:
        self._folder = private_folder()
        self._held: socket.socket | None = None
        self._process: _NodeProcess | None = None
        self._start = 0
        self._lock = threading.Lock()

    def place(self) -> str:
        """Return host:port with a port that stays reserved for this actor: it is bound but not listening, so the script
        can listen on it."""
        host = str(import_module("ray").util.get_node_ip_address())
        if self._held is None:
            self._held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind((host, 0))
        port = self._held.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self, work: Work) -> int:
        """Start the script, after the previous one has ended. Returns the number of this start."""
        if work.script and not Path(work.script).is_file():
            raise RoleError(
                f"no {work.script} on node {socket.gethostname()} in {os.getcwd()}: the script's folder was not sent "
                "there. Start Ray by fleetrun, or with a runtime environment whose working_dir has the script."
            )
        with self._lock:
            if self._process is not None:
                self._process.kill()
            environment = {**work.task.environment, "FLEET_ADDRESS_BOOK": str(self._book)}
            if work.keys:
                environment["FLEET_KEY_DIR"] = str(self._write_keys(work.keys))
            if work.function:
                environment[FUNCTION] = str(self._write(self._folder / "function", work.function))
            write_book(self._book, work.moved)
            task = Task(work.task.role, work.task.index, environment, work.task.replica)
            self._start += 1
            self._process = _NodeProcess(task, [sys.executable, *work.command], self._folder, print)
            return self._start

    def look(self, timeout: float) -> Look:
        """Return the state of the process and its output since the last call. Blocks up to `timeout` s for output."""
        process, start = self._process, self._start
        if process is None:
            return Look(0, None, {}, b"")
        output = process.outbox.take(timeout)
        code = process.returncode
        if code is not None:
            process.last_lines()  # waits for the thread that reads
            output += process.outbox.take(0.0)
        return Look(start, code, process.status(), output)

    def result(self) -> bytes:
        """Return the pickled result of the function; empty if there is none."""
        found = self._folder / f"function{RESULT}"
        return found.read_bytes() if found.exists() else b""

    def move(self, moved: Mapping[str, str]) -> None:
        """Tell the process the current addresses of servers that moved."""
        write_book(self._book, moved)

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(number)

    def kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process, and remove its keys."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _book(self) -> Path:
        return self._folder / "addresses"

    def _write_keys(self, keys: Mapping[str, bytes]) -> Path:
        folder = self._folder / "keys"
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, data in keys.items():
            self._write(folder / name, data)
        return folder

    @staticmethod
    def _write(path: Path, data: bytes) -> Path:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        return path


def private_folder() -> Path:
    """Create a folder of mode 0700, in memory if possible, so that keys are not written to a disk. Folders left by
    killed processes of this user are removed."""
    parent = Path(_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*-*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and left.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))


def keys_for(role: str, index: int, folder: str | None) -> dict[str, bytes]:
    """Return the key files that a role needs: all public keys, and its own secret key."""
    if folder is None:
        return {}
    own = {"server": "server", "worker": "worker" if index else "first_worker"}[role]
    names: Sequence[Path] = [*sorted(Path(folder).glob("*.key")), Path(folder) / f"{own}.key_secret"]
    return {path.name: path.read_bytes() for path in names}
