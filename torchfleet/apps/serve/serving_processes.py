"""The processes of `fleet serve`: started on one socket, started again when one dies, and ended together."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from types import FrameType

import msgspec

from torchfleet.apps.serve.serving_metrics import ServingMetrics
from torchfleet.apps.serve.settings import FAILED, ServeSettings, WorkerStart, check_files
from torchfleet.base.errors import FleetError
from torchfleet.base.own_folders import OwnFolder
from torchfleet.base.printable import say

_LOOK = 0.05  # seconds between two looks at the processes
_QUICK = 10.0  # seconds: a process that ends sooner is started again after a pause
_PAUSES = (0.1, 5.0)  # seconds: the first and the longest
_MOST_STARTS = 3  # of each process, if they end before all are ready
_MODULE = "torchfleet.apps.serve.worker_process"


@dataclass
class _Process:
    """One serving process, or the pause before it is started again."""

    number: int
    running: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    pause: float = 0.0
    start_at: float = 0.0
    ready: int = -1  # descriptor to read from, until the process is ready or has ended
    is_ready: bool = False


class ServingProcesses:
    """All serving processes. They share one socket: a connection waits there until one of the processes accepts it."""

    def __init__(self, settings: ServeSettings) -> None:
        check_files(settings)
        self._socket = _bound(settings)
        self.port = int(self._socket.getsockname()[1])
        self._grpc_socket = _held(settings) if settings.grpc_port else None
        self._versions = OwnFolder("serve")
        self._settings = msgspec.structs.replace(settings, workdir=str(self._versions.path))
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-serve-")
        self._metrics = os.path.join(self._folder.name, "metrics")
        ServingMetrics.create(self._metrics, settings.workers)
        self._alive = os.pipe()  # the processes end when its writing end is closed, however this process ends
        self._processes = [_Process(number) for number in range(settings.workers)]
        self._asked = threading.Event()
        self._has_told = False
        self._num_ended = 0  # processes that ended before all were ready

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM. Returns the exit status."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while not self._asked.is_set():
                for process in self._processes:
                    if not self._watch(process):
                        return 1
                self._asked.wait(_LOOK)
            return 0
        finally:
            self.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """End all processes, after they have answered the requests that they have begun."""
        self._socket.close()  # first: as long as any process holds it, the kernel accepts connections
        os.close(self._alive[1])
        for process in self._processes:
            if process.running is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.running.terminate()
        end = time.monotonic() + self._settings.timeout_s + 3
        for process in self._processes:
            if process.running is not None:
                try:
                    process.running.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.running.kill()
                    process.running.wait()
        if self._grpc_socket is not None:
            self._grpc_socket.close()
        self._folder.cleanup()
        self._versions.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    def _watch(self, process: _Process) -> bool:
        """Start the process if it does not run. Returns False if the model cannot be served."""
        if process.running is None:
            if time.monotonic() >= process.start_at:
                self._start(process)
            return True
        if process.ready >= 0 and select.select([process.ready], [], [], 0)[0]:
            self._note_ready(process)
        status = process.running.poll()
        if status is None:
            return True
        process.running, process.is_ready = None, False
        self._num_ended += not self._has_told
        if not self._has_told and (status == FAILED or self._num_ended == _MOST_STARTS * len(self._processes)):
            return False
        is_quick = time.monotonic() - process.began < _QUICK
        process.pause = min(_PAUSES[1], max(_PAUSES[0], 2 * process.pause)) if is_quick else 0.0
        process.start_at = time.monotonic() + process.pause
        say(f"fleet serve: process {process.number} ended with status {status}, and is started again", file=sys.stderr)
        return True

    def _start(self, process: _Process) -> None:
        reading, writing = os.pipe()
        fds = self._socket.fileno(), self._alive[0], writing
        start = WorkerStart(self._settings, process.number, *fds, self._metrics)
        arguments = [sys.executable, "-m", _MODULE, msgspec.json.encode(start).decode()]
        process.running = subprocess.Popen(arguments, pass_fds=fds, start_new_session=True)
        os.close(writing)
        if process.ready >= 0:
            os.close(process.ready)
        process.ready, process.began = reading, time.monotonic()

    def _note_ready(self, process: _Process) -> None:
        process.is_ready = bool(os.read(process.ready, 1))
        os.close(process.ready)
        process.ready = -1
        if not self._has_told and all(other.is_ready for other in self._processes):
            self._has_told = True
            scheme = "https" if self._settings.tls_cert else "http"
            host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
            grpc = f" (gRPC at {host}:{self._settings.grpc_port})" if self._settings.grpc_port else ""
            path = f"v2/models/{self._settings.name}"
            say(f"fleet serve: {self._settings.name} at {scheme}://{host}:{self.port}/{path}{grpc}")


def _bound(settings: ServeSettings) -> socket.socket:
    made = _socket(settings)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _bind(made, settings.host, settings.port, "port", ", or --port 0 for any that is free")
    return made


def _held(settings: ServeSettings) -> socket.socket:
    """Reserve the port of gRPC for these processes, each of which listens on it with its own socket."""
    with _socket(settings) as alone:  # fails if another program listens on the port, even with SO_REUSEPORT
        _bind(alone, settings.host, settings.grpc_port, "grpc_port")
    made = _socket(settings)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    _bind(made, settings.host, settings.grpc_port, "grpc_port")
    return made


def _socket(settings: ServeSettings) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _bind(made: socket.socket, host: str, port: int, option: str, more: str = "") -> None:
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise FleetError(
            f"--host {host} --{option} {port} cannot be used: {error.strerror}. Give another --host or --{option}{more}"
        ) from None
