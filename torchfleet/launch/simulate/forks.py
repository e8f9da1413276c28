"""The processes of a simulated job: forked from a process with all imports, so that many fit into memory."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from torchfleet.api import distributing, job_life, metrics, saves, table_calls, training_passes, util  # noqa: F401
from torchfleet.api.prepare.prepare_job import stop_at_exit
from torchfleet.base.process_place import ProcessPlace, give_place
from torchfleet.launch.run_as_main import run_as_main
from torchfleet.launch.simulate.conditions import Job, Part
from torchfleet.launch.simulate.coordinator import ProcessFailed
from torchfleet.launch.simulate.inside.actors import Schedule
from torchfleet.launch.simulate.inside.step_watch import StepWatch
from torchfleet.launch.simulate.inside.virtual_ranks import BACKEND, VARIABLE, VirtualRanks
from torchfleet.launch.simulate.inside.virtual_sockets import VirtualNetwork
from torchfleet.launch.simulate.inside.virtual_threads import end_threads, install
from torchfleet.launch.simulate.packets import Line
from torchfleet.ps.net.addresses import TRANSPORTS
from torchfleet.ps.server.job.warm import compile_all, warm_up

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LINE_BYTES = 1 << 22
_PATIENCE = 60  # seconds
_USER_TICKS, _SYSTEM_TICKS = 11, 12  # fields of /proc/PID/stat after the name


class Child:
    """A forked process and the coordinator's end of its line."""

    def __init__(self, part: Part, pid: int, connection: socket.socket) -> None:
        self.part, self.pid = part, pid
        self.look: Callable[[], None] = lambda: None  # called while a turn takes seconds
        self.line = Line(connection, self._look_at_silence)
        self._used, self._num_silent = -1, 0  # processor ticks used so far; seconds without a new tick

    def _look_at_silence(self) -> None:
        """Check that a process uses the processor during its turn. A wait in real time would last for ever."""
        self.look()
        with open(f"/proc/{self.pid}/stat") as status:
            fields = status.read().rpartition(")")[2].split()
        used = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        self._num_silent = self._num_silent + 1 if used == self._used else 0
        self._used = used
        if self._num_silent >= _PATIENCE:
            os.kill(self.pid, signal.SIGUSR1)  # its threads write their tracebacks to the log
            time.sleep(1.0)
            raise ProcessFailed(
                self.part,
                f"{self.part.name} has waited for {_PATIENCE} s of real time for something that is not part of the "
                "simulation, such as a process or a socket of its own; its log says where",
            )


def end(child: Child) -> None:
    """Kill a child and the processes that it started, and wait for its end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)  # it may not have its own process group yet
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child.pid, 0)
    child.line.close()


def prepare() -> None:
    """Import and compile what all processes need. Starts no thread and runs no backward pass: neither survives a
    fork."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # triggers many lazy imports
    compile_all()  # else every server would start a process that compiles
    warm_up()  # loads the kernels here if another process was compiling them
    gc.collect()
    gc.freeze()  # keeps pages shared: the collector does not write to them


def fork(job: Job, number: int, epoch: float) -> Child:
    """Start process `number` of the job. It waits for its first turn."""
    part = job.parts[number]
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LINE_BYTES)
    pid = os.fork()
    if not pid:
        ours.close()
        code = 1
        try:
            code = _live(job, number, Line(theirs), epoch)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    theirs.close()
    return Child(part, pid, ours)


def _live(job: Job, number: int, line: Line, epoch: float) -> int:
    """Run a forked process from start to end and return its exit status."""
    part, conditions = job.parts[number], job.conditions
    _begin_process(part)
    give_place(ProcessPlace(f"simulated-{number}", 1))  # every process is a machine of its own
    _seed(conditions.seed * 100_003 + number)
    factor = conditions.factor(part.role, part.index, job.num_workers)
    is_measured = conditions.step_seconds is None
    scale = conditions.compute_scale * factor if is_measured else 0.0
    schedule = Schedule(line, number, conditions.link.latency, scale)
    schedule.reach()  # the first turn
    install(schedule, epoch)
    addresses = {f"tcp://{address}": index for index, address in enumerate(job.servers)}
    TRANSPORTS["tcp"] = VirtualNetwork(schedule, addresses, conditions.request_seconds)
    if part.role == "worker":
        watch = StepWatch(schedule, (conditions.step_seconds or 0.0) * factor, conditions.step_factors(part.index))
        watch.install()
        VirtualRanks(schedule, watch.note_reduce).install(part.index, job.num_workers)
    schedule.go_on()
    code = _run(job.script, job.arguments, job.is_module)
    if code == 0:
        stop_at_exit()  # while its threads still run
    end_threads()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    schedule.end(code)
    return code


def _begin_process(part: Part) -> None:
    """Set up session, signals, streams and environment as for a separate process."""
    os.setsid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(part.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for opened, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(opened, stream)
    for stream_object in (sys.stdout, sys.stderr):
        stream_object.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)  # for a process that is stuck in real time
    os.environ.clear()
    os.environ.update(part.environment, **{VARIABLE: BACKEND})
    torch.set_num_threads(1)  # torch replaces its pool of threads after a fork, and crashes if two threads do so


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def _run(script: str, arguments: Sequence[str], is_module: bool) -> int:
    """Run the script or the module as a separate process would, and return its exit status."""
    try:
        run_as_main(script, arguments, is_module)
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(Path(script)):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace or error.__traceback__), trace or error.__traceback__)
        return 1
    return 0
