"""`python -m torchfleet.ps.server.job.nursery FD`: a process that has imported all a server needs, and forks servers.

fleetrun starts one where several servers without a script run on a machine: they share its memory pages, and each
starts at once, also after a loss. Requests come on the Unix socket FD, one packet each: the write end of a pipe for the
server's output, one end of a second socket (the line), and the server's options and environment. The line returns the
process id and, at the end, the exit status. The nursery ends when socket FD is closed, and then its servers end, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from torchfleet.ps.kernels.jit import mark_of_all
from torchfleet.ps.server.job.main import main
from torchfleet.ps.server.job.warm import load_all

MAX_REQUEST = 1 << 17  # bytes of a request
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Nursery:
    """Serves the requests of one socket. It has no threads: a fork would not have them."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._lines: dict[int, socket.socket] = {}  # by process id
        self._woken, self._wakes = socket.socketpair()
        self._parent = os.getpid()

    def serve(self) -> None:
        """Fork servers until the socket is closed."""
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler there is no wake-up
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            is_open = True
            while is_open:
                ready = {key.fileobj for key, _ in selector.select()}
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._reap()
                is_open = self._requests not in ready or self._take()

    def _take(self) -> bool:
        """Fork the server of the next request. Returns False if there will be no more."""
        try:
            data, files, _, _ = socket.recv_fds(self._requests, MAX_REQUEST, 2)
        except ConnectionResetError:
            return False
        if len(files) != 2:
            return False
        output, line = files[0], socket.socket(fileno=files[1])
        child = os.fork()
        if not child:
            self._become_server(data, output, line)
        os.close(output)
        self._lines[child] = line
        return True

    def _reap(self) -> None:
        while self._lines:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            with self._lines.pop(child) as line, contextlib.suppress(OSError):
                line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _become_server(self, data: bytes, output: int, line: socket.socket) -> NoReturn:
        """In the forked process: run the server, and end."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            os.setsid()
            for target in (1, 2):
                os.dup2(output, target)
            line.sendall(f"{os.getpid()}\n".encode())
            for end in (self._requests, self._woken, self._wakes, line, *self._lines.values()):
                end.close()
            os.close(output)
            if os.getppid() == self._parent:  # otherwise the nursery has ended before prctl
                code = _run(json.loads(data))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        os._exit(code)


def _run(request: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(request["environment"])
    name = f"fleet server {os.environ.get('FLEET_SERVER_INDEX', '')}"  # its command line is the nursery's
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])
    _show(f"torch{name}")
    os.chdir(request["folder"])
    if num_threads() > 1:  # something that was imported has started one, which a fork does not have
        os.execv(sys.executable, [sys.executable, "-m", "torchfleet.server", *request["options"]])
    code = main(request["options"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _show(title: str) -> None:
    """Show `title` as the command line of this process, as far as there is room: `ps` had shown the nursery's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # of the memory that the kernel shows; 0 if it does not tell
    if start and end - start > 1:
        ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def num_threads() -> int:
    """Return the number of threads of this process, also of those that libraries have started."""
    return len(list(Path("/proc/self/task").iterdir()))


def _serve(descriptor: int) -> None:
    requests = socket.socket(fileno=descriptor)
    requests.set_inheritable(False)
    if mark_of_all().exists():
        load_all()
    gc.collect()
    gc.freeze()  # pages that no process writes to stay shared
    Nursery(requests).serve()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
