"""The nursery: a process that has imported torch and all of torchfleet, and forks what is asked for.

`python nursery.py MODULE ...` has imported these modules, too, and reads requests from the Unix socket that is its
standard input, one packet each: three standard streams, one end of a line, and files that the process is to inherit.
Along the line come the command, its folder, its environment and the numbers of those files, and go the process's id
and, at last, its exit status. A nursery may itself be forked by another one. What it forks behaves as
`python -c CODE`, `python -m MODULE` or `python SCRIPT` does, and starts Python processes of its own, and replaces
itself by them, through the nursery too. A process is killed when the one that asked for it is gone. The nursery itself
ends when none is left to ask.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import io
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

_KEPT = 500  # where the socket of requests lies in every process that was forked
_FILES = 100  # that a process may inherit
_LEFT_OUT = (  # adapters to packages whose import takes seconds, and what needs a GPU
    "torchfleet.lightning", "torchfleet.transformers", "torchfleet.apps.lightning", "torchfleet.apps.transformers",
    "torchfleet.ps.gpu", "torchfleet.collective.strategies.layerwise.multi_tensor_kernels",
)  # fmt: skip
ENVIRONMENTS = Path(tempfile.gettempdir()) / f"torchfleet-forked-{os.getuid()}"  # by process id; /proc knows only execs


class _Replaced(BaseException):
    """os.execv of a Python command."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)


def is_python(command: object) -> bool:
    """Whether this is a command that the nursery can run."""
    if not isinstance(command, (list, tuple)) or len(command) < 2 or str(command[0]) != sys.executable:
        return False
    return str(command[1]) in ("-c", "-m") or not str(command[1]).startswith("-")


class Nursery:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._inner, self._inners = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # of what was forked
        self._lines: dict[int, socket.socket] = {}  # of what runs
        self._paths = [path for path in sys.path if path not in _path_of(os.environ)][1:]
        self._woken, self._wakes = socket.socketpair()

    def serve(self) -> None:
        """Until no process is left to ask, and nothing runs."""
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler is needed for the wake-up
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._requests, selectors.EVENT_READ, None)
            selector.register(self._inner, selectors.EVENT_READ, None)
            selector.register(self._woken, selectors.EVENT_READ, None)
            while selector.get_map():
                for key, _ in selector.select():
                    if key.data is not None:
                        self._drop(key.data)
                    elif key.fileobj is not self._woken:
                        self._accept(key.fileobj)
                self._reap()

    def _accept(self, requests: Any) -> None:
        fds: list[int] = []
        with contextlib.suppress(ConnectionResetError):
            _, fds, _, _ = socket.recv_fds(requests, 1, 4 + _FILES)
        if not fds:  # the tests are over
            for end in (self._requests, self._inner, self._woken):
                self._selector.unregister(end)
            for child in list(self._lines):
                self._drop(child)
                (ENVIRONMENTS / str(child)).unlink(missing_ok=True)  # it may never be reaped, and its id be used again
            return
        line = socket.socket(fileno=fds[3])
        request = line.makefile().readline()
        child = os.fork()
        if not child:
            self._begin(json.loads(request), fds, line)
        for fd in (*fds[:3], *fds[4:]):
            os.close(fd)
        self._lines[child] = line
        self._selector.register(line, selectors.EVENT_READ, child)

    def _drop(self, child: int) -> None:
        """Its starter is gone: this is never left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        self._selector.unregister(self._lines[child])

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._lines:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            line = self._lines.pop(child)
            with contextlib.suppress(KeyError):
                self._selector.unregister(line)
            (ENVIRONMENTS / str(child)).unlink(missing_ok=True)
            with line, contextlib.suppress(OSError):
                line.sendall(json.dumps(status).encode() + b"\n")

    def _begin(self, request: dict[str, Any], fds: Sequence[int], line: socket.socket) -> NoReturn:
        """In the process that was forked."""
        try:
            for target, fd in enumerate(fds[:3]):
                os.dup2(fd, target)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout, sys.stderr = _stream(1, "strict"), _stream(2, "backslashreplace")
            os.dup2(self._inners.fileno(), _KEPT, inheritable=False)
            if request["session"]:
                os.setsid()
            os.chdir(request["folder"])
            _forget_signals()
            os.environ.clear()
            os.environ.update(request["environment"])
            _publish_environment()
            line.sendall(f"{os.getpid()}\n".encode())
            line.detach()
            _keep(fds[4:], request["files"])
            code = _run(request["command"], self._paths)
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)


def _keep(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """These files, under their numbers of the process that asked, and the socket of requests; no other stays open."""
    first = max([_KEPT, *numbers]) + 1  # above all that is to be kept
    files = [fcntl.fcntl(fd, fcntl.F_DUPFD, first) for fd in fds]
    os.closerange(3, _KEPT)
    os.closerange(_KEPT + 1, first)
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number)
    os.closerange(first, 1 << 12)


def _publish_environment() -> None:
    path = ENVIRONMENTS / str(os.getpid())
    path.with_suffix(".new").write_text(json.dumps(dict(os.environ)))
    path.with_suffix(".new").rename(path)


def _stream(fd: int, errors: str) -> io.TextIOWrapper:
    """As `python -u` makes it. The nursery's own knows whether its file, another one, could be sought in."""
    return io.TextIOWrapper(open(fd, "wb", buffering=0, closefd=False), errors=errors, write_through=True)


def _forget_signals() -> None:
    """Python's own handlers, as in a new process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(command: Sequence[str], paths: Sequence[str]) -> int:
    """The exit status of this command, and of those that it replaces itself by; in this process."""
    import fsspec.config
    import numpy as np

    np.random.seed()
    fsspec.config.set_conf_env(fsspec.config.conf)  # what it has read when it was imported was of another environment
    _stay_in_the_nursery()
    while True:
        try:
            return _ended(_status_of(command, paths))
        except _Replaced as replaced:
            command = replaced.command


def _status_of(command: Sequence[str], paths: Sequence[str]) -> int:
    try:
        _execute(command, paths)
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except _Replaced:
        raise
    except KeyboardInterrupt as error:
        sys.excepthook(KeyboardInterrupt, error.with_traceback(_without_own_frames(error)), error.__traceback__)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(_without_own_frames(error)), error.__traceback__)
        return 1
    return 0


def _without_own_frames(error: BaseException) -> types.TracebackType | None:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace or error.__traceback__


def _execute(command: Sequence[str], paths: Sequence[str]) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    first, rest = command[1], list(command[2:])
    if first == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *_path_of(os.environ), *paths]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv, sys.path[:] = ["-m", *rest[1:]], [os.getcwd(), *_path_of(os.environ), *paths]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        script = str(Path(first).absolute())
        sys.argv, sys.path[:] = [first, *rest], [str(Path(script).parent), *_path_of(os.environ), *paths]
        main.__file__ = script
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _ended(code: int) -> int:
    """As Python ends: its threads, what was to be done at exit, what is still to be written."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _stay_in_the_nursery() -> None:
    """Python processes that this one starts, or replaces itself by, are forked too."""
    from support.processes import Forked

    Forked.requests = socket.socket(fileno=_KEPT)
    really = os.execv

    def execv(path: Any, command: Any) -> None:
        if is_python(list(command)):
            raise _Replaced(list(command))
        really(path, command)

    os.execv = execv  # type: ignore[assignment]


def _path_of(environment: Any) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def _import(modules: Sequence[str]) -> None:
    """These, and all that any test needs; nothing that would not survive a fork: no backward pass, no thread."""
    import encodings.idna  # noqa: F401  # what the first name of a machine needs
    import subprocess

    from support.processes import Forked

    subprocess.Popen = Forked  # type: ignore[misc]  # first of all: torch keeps the class that it finds
    import torch
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor

    import torchfleet

    _import_package(torchfleet)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports more than one would think
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=_renew_threads)
    _load_kernels()
    _trace_a_network()
    for name in modules:
        import_module(name)
    if Forked.requests is not None:  # of the nursery that has forked this one
        Forked.requests.close()
        Forked.requests = None


def _renew_threads() -> None:
    """After a fork, torch replaces its pool of threads when it is next used. Two threads that do it at once, as those
    of a first backward pass, crash."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _import_package(package: types.ModuleType) -> None:
    """All of it but what is left out, modules that `python -m` runs (it would warn of those), and modules of an extra
    that is not installed: tests that need the extra are skipped, and all others do without."""
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if found.name in _LEFT_OUT or _is_run(found.name):
            continue
        try:
            module = import_module(found.name)
        except ModuleNotFoundError as error:
            from support.extras import is_of_an_extra

            if is_of_an_extra(error.name):
                continue
            raise
        if found.ispkg:
            _import_package(module)


def _is_run(module: str) -> bool:
    spec = find_spec(module)
    assert spec
    assert spec.origin
    return module.endswith(".__main__") or 'if __name__ == "__main__":' in Path(spec.origin).read_text()


def _load_kernels() -> None:
    """The first kernel of a process makes numba import half a second's worth of modules; a server loads all of them
    before it serves, unless the process that forked it has."""
    from unittest import mock

    from torchfleet.ps.server.job import warm

    with mock.patch.object(warm, "keep_freed_memory"):  # a setting of the process, which servers alone make
        warm.load_all()


def _trace_a_network() -> None:
    """The first save of a process makes torch.export import half a second's worth of modules. It asks for GPUs, too,
    after which no process that is forked can use one: where there may be one, a process that saves imports them."""
    import torch

    if has_gpu_driver():
        return
    dims = ({0: torch.export.Dim("samples", min=1)},)
    torch.export.export(torch.nn.Linear(2, 1).eval(), (torch.zeros(3, 2),), dynamic_shapes=dims, strict=False)


def has_gpu_driver() -> bool:
    """Whether an NVIDIA driver is loaded and its GPUs are not hidden. Does not ask CUDA, whose state a forked process
    cannot use.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and os.path.exists("/dev/nvidiactl")


def _serve(modules: Sequence[str]) -> None:
    if os.fork():  # the one that serves has no parent: other tests look for processes that are left
        os._exit(0)
    os.setsid()  # Ctrl-C is for the tests, which end what they started
    ENVIRONMENTS.mkdir(exist_ok=True)
    for path in ENVIRONMENTS.glob("*"):
        if not Path("/proc", path.stem).exists():
            path.unlink(missing_ok=True)  # left by a nursery that was killed
    _import(modules)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # each kernel's, at every exit: they take 50 ms
    gc.collect()
    gc.freeze()  # untouched pages stay shared
    Nursery(socket.socket(fileno=0)).serve()


if __name__ == "__main__":
    _serve(sys.argv[1:])
