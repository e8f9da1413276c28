"""Processes of pytest-xdist that start with all files of tests imported: forked, not started anew.

Every one of them reads all files of tests, most of which is importing them, and starts a nursery for the processes of
its tests. The process of pytest that starts them has two nurseries instead: that of the tests' processes, which all
share, and one that has collected the tests, by which they are forked. This module is what the second one imports.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import posix
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support import processes
from support.processes import Forked

COLLECTED = "TORCHFLEET_COLLECTED"  # what the nursery collects: arguments of pytest
_BEGIN = "from support.forked_workers import begin; begin({file})\n"
_kept: list[socket.socket] = []  # a nursery ends when its socket is closed


@contextlib.contextmanager
def forking(arguments: Sequence[str]) -> Iterator[None]:
    """Within it, execnet's processes are forked by one that has collected these files and folders."""
    shared = processes.nursery_of(())
    Forked.requests = shared
    own = processes.started_nursery((__name__,), {**os.environ, COLLECTED: json.dumps(list(arguments))})
    _kept.append(own)

    class Worker(Forked):
        requests = own

        def __init__(self, command: Sequence[str], **options: Any) -> None:
            assert list(command[1:3]) == ["-u", "-c"], f"not what execnet starts: {command}"
            code = _BEGIN.format(file=shared.fileno()) + command[3]
            super().__init__([command[0], "-c", code], pass_fds=[shared.fileno()], **options)

    really = subprocess.Popen
    subprocess.Popen = Worker  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen, Forked.requests = really, None  # type: ignore[misc]


def begin(file: int) -> None:
    """In the process that was forked: as one that was started, beside the nursery that all share."""
    assert Forked.requests
    Forked.requests.close()
    Forked.requests = processes.share_nursery(socket.socket(fileno=file))
    os.execv = posix.execv


def _collect() -> None:
    subprocess.Popen = Forked.__base__  # type: ignore[misc,assignment]  # tests start real interpreters by it
    paths = list(sys.path)
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-qq", "-n", "0", "-p", "no:cacheprovider", *json.loads(os.environ[COLLECTED])])
    sys.path[:] = paths  # folders of tests come before all others there
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"a file of tests starts a thread, which a fork does not have: {threading.enumerate()}"


if COLLECTED in os.environ:
    _collect()
