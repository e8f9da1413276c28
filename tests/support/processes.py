"""Python processes to test with, that start in no time: forked, torch and torchfleet imported already.

`Popen` and `run` are those of `subprocess` for commands that begin with `sys.executable`. The process is a real one,
with streams, signals and an exit status of its own; only its interpreter was not started anew, and it is not this
process's child. What it starts is forked too, so that `fleetrun` and all roles of a job cost no import of torch. Tests
about how processes start, or that look at one from outside (/proc, imports, time to start), use `subprocess`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import psutil
from support import nursery
from support.paths import ROOT

SECONDS = 250.0  # that the nursery may take to import everything, on busy cores
_nurseries: dict[tuple[str, ...], socket.socket] = {}  # by what they have imported


class Forked(subprocess.Popen[Any]):
    """A process of the nursery, if there is one; any other command is subprocess.Popen's own."""

    requests: ClassVar[socket.socket | None] = None
    _line: socket.socket | None = None

    def _execute_child(  # what subprocess.Popen calls to start the process, once its pipes are made
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
        start_new_session: bool, *process_group: Any,
    ) -> None:  # fmt: skip
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        if self.requests is None or not nursery.is_python(args):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *pipes,
                restore_signals, gid, gids, uid, umask, start_new_session, *process_group,
            )  # fmt: skip
            return
        self._line, theirs = socket.socketpair()
        with theirs:
            fds = [own if pipe == -1 else pipe for own, pipe in enumerate((p2cread, c2pwrite, errwrite))]
            socket.send_fds(self.requests, [b"?"], [*fds, theirs.fileno(), *pass_fds])
        request = {
            "command": [os.fspath(part) for part in args],
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
            "files": list(pass_fds),
        }
        self._line.sendall(json.dumps(request).encode() + b"\n")
        pid = self._read(SECONDS)
        assert pid is not None, f"the nursery starts nothing within {SECONDS:g} s"
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _read(self, timeout: float | None) -> int | None:
        """The next number that the nursery sends; None if none came in time."""
        assert self._line
        if not select.select([self._line], [], [], timeout)[0]:
            return None
        found = b""
        while not found.endswith(b"\n"):  # a line is sent at once
            more = self._line.recv(1)
            if not more:
                return signal.SIGKILL  # the nursery is gone, and what it forked with it
            found += more
        return int(found)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """os.waitpid, which knows only children."""
        if self._line is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        status = self._read(0 if wait_flags & os.WNOHANG else None)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *arguments: Any, **more: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*arguments, **more)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                ended, status = self._try_wait(os.WNOHANG)
                if ended:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def nursery_of(modules: tuple[str, ...]) -> socket.socket:
    """The socket at which one that has imported these modules takes requests; it ends when that is closed."""
    if modules not in _nurseries:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLEET_", "PADDLE_"))}
        _nurseries[modules] = started_nursery(modules, kept)
    return _nurseries[modules]


def started_nursery(modules: tuple[str, ...], environment: dict[str, str]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with theirs:
        starter = Forked(
            [sys.executable, nursery.__file__, *modules],
            env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdin=theirs,
        )
    assert starter.wait(SECONDS) == 0
    return ours


def share_nursery(requests: socket.socket) -> socket.socket:
    """Take the nursery at this socket, which other processes use too, for the processes of this one."""
    return _nurseries.setdefault((), requests)


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """Within it, processes have imported these modules, too: once for all tests that need the same ones. For packages
    that take seconds, and whose import starts no thread."""
    Forked.requests = nursery_of(())
    Forked.requests = nursery_of(modules)
    try:
        yield
    finally:
        Forked.requests = nursery_of(())


def Popen(command: Sequence[str], **options: Any) -> Forked:
    assert nursery.is_python(command), f"not a Python command: {command}"
    if Forked.requests is None:
        Forked.requests = nursery_of(())
    return Forked(command, **options)


def run(
    command: Sequence[str], *, timeout: float, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """subprocess.run; the output, both streams in one unless `stderr` is given, is captured."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What is started within it with `subprocess` takes SIGINT, also where these tests were started without it, as by
    `make test &` in a script: a signal that is ignored stays so in all processes below."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def environment_of(process: psutil.Process) -> dict[str, str]:
    """A process's environment, of one that was forked too."""
    with contextlib.suppress(FileNotFoundError):
        found: dict[str, str] = json.loads((nursery.ENVIRONMENTS / str(process.pid)).read_text())
        return found
    return dict(process.environ())


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """Processes whose environment has this, of those that were forked too; no zombies.

    Bytes are looked at, not psutil's dictionaries: every job of the tests looks through all processes several times.
    """
    forked = {int(path.name): path for path in nursery.ENVIRONMENTS.glob("*") if path.name.isdigit()}
    forked_with, started_with = f"{json.dumps(name)}: {json.dumps(value)}", os.fsencode(f"{name}={value}")
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, or is not ours
            if pid in forked:
                is_wanted = forked_with in forked[pid].read_text()
            else:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    is_wanted = started_with in file.read().split(b"\0")
            if is_wanted and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
