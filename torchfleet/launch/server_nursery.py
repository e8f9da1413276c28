"""Servers that a nursery forks: the launcher's side of ps/server/job/nursery.py."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Protocol

from torchfleet.base.role.process_settings import FORK_SERVERS
from torchfleet.base.role.variables import is_on
from torchfleet.launch.job_spec import JobSpec, Task

# Run before the command itself: if the launcher is killed, the kernel ends its children (PR_SET_PDEATHSIG).
TIE_TO_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
_MODULE = "torchfleet.ps.server.job.nursery"
_MAX_REQUEST = 1 << 17  # bytes, as in ps/server/job/nursery.py
_START = 120.0  # seconds that a nursery has to start, also on busy cores


class Spawned(Protocol):
    """The part of subprocess.Popen that a launcher uses of a started process."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class ForkedServer:
    """A server that the nursery forks, now or as soon as the nursery has started."""

    def __init__(self, line: socket.socket, output: int) -> None:
        self._line, self._lock, self._found = line, threading.Lock(), b""
        self.stdout: IO[bytes] | None = open(output, "rb", buffering=0)  # noqa: SIM115
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Blocks until the server is forked. Raises ProcessLookupError if the nursery does not fork it in time."""
        with self._lock:
            if not self._lines() and self.returncode is None:
                self._read(_START)
            if not self._lines():
                raise ProcessLookupError("the process that was to fork this server has ended")
            return self._lines()[0]

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self._read(0.0)
            return self.returncode

    def wait(self) -> int:
        with self._lock:
            while self.returncode is None:
                self._read(None)
            return self.returncode

    def _lines(self) -> list[int]:
        return [int(line) for line in self._found.split(b"\n")[:-1]]

    def _read(self, timeout: float | None) -> None:
        """Read what the nursery says of this server: its process id, then its exit status."""
        if not select.select([self._line], [], [], timeout)[0]:
            return
        try:
            data = self._line.recv(64)
        except ConnectionResetError:
            data = b""
        self._found += data
        lines = self._lines()
        if not data or len(lines) > 1:  # a nursery that ends takes its servers with it
            self.returncode = lines[1] if len(lines) > 1 else -signal.SIGKILL
            self._line.close()


class ServerNursery:
    """A nursery of this launcher. Closing it ends its servers."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", TIE_TO_PARENT, sys.executable, "-m", _MODULE, str(theirs.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    def start(self, options: Sequence[str], environment: Mapping[str, str]) -> ForkedServer | None:
        """Fork a server with these options and this environment. Returns None if the nursery cannot: it has ended, or
        the environment is too large for a message."""
        request = {"options": list(options), "environment": dict(environment), "folder": os.getcwd()}
        data = json.dumps(request).encode()
        if self._process.poll() is not None or len(data) > _MAX_REQUEST:
            return None
        ours, theirs = socket.socketpair()
        source, output = os.pipe()
        try:
            socket.send_fds(self._requests, [data], [output, theirs.fileno()])
        except OSError:
            os.close(source)
            ours.close()
            return None
        finally:
            os.close(output)
            theirs.close()
        return ForkedServer(ours, source)

    def close(self) -> None:
        self._requests.close()
        self._process.terminate()  # it may still be importing
        self._process.wait()


@contextlib.contextmanager
def nursery_of(job: JobSpec, tasks: Sequence[Task]) -> Iterator[ServerNursery | None]:
    """Yield a nursery if several servers of this machine do not need the script, and FLEET_FORK_SERVERS is not 0; else
    None."""
    num_servers = sum(task.role == "server" for task in tasks)
    if not job.server_command or num_servers < 2 or not is_on(os.environ, FORK_SERVERS, "1"):
        yield None
        return
    with contextlib.closing(ServerNursery()) as made:
        yield made
