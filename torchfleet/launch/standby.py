"""A process in reserve: it has imported torch and collective training, and becomes a rank when one has to be replaced.

python -m torchfleet.launch.standby      waits for a line of JSON, {"command": [...], "environment": {...}}
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class Standby:
    """The launcher's process in reserve; none before `prepare`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: what every rank has, and torch reads when it is imported."""
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start the process, unless there is one."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchfleet.launch.standby"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )

    def take(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Let the process run `command` of Python, and return it; None if no process is in reserve."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return None
        assert process.stdin is not None
        try:
            process.stdin.write(
                json.dumps({"command": list(command), "environment": dict(environment)}).encode() + b"\n"
            )
            process.stdin.close()
        except OSError:  # it has just ended
            return None
        return process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.kill()
            process.stdin.close()
            process.wait()


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the launcher

    import torchfleet.api.elastic
    import torchfleet.collective.collective_job
    import torchfleet.collective.elastic.elastic_steps  # noqa: F401  (what a rank imports)

    line = sys.stdin.readline()
    if line:  # otherwise the job has ended
        told = json.loads(line)
        os.environ.clear()
        os.environ.update(told["environment"])
        _redirect(os.environ["FLEET_LOG_FILE"])
        run_python(told["command"][1:])


def _redirect(log: str) -> None:
    """As the process of a rank: no input, and all output to its log."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    end = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(end, 1)
    os.dup2(end, 2)


def run_python(arguments: Sequence[str]) -> None:
    """Do as `python ARGUMENTS` does: a script, or -m and a module, with their own arguments."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
