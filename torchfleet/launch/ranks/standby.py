"""A process in reserve: it has imported torch and collective training, and becomes a rank when one has to be replaced.

python -m torchfleet.launch.ranks.standby      waits for a line of JSON, {"command": [...], "environment": {...}}
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from torchfleet.launch.run_as_main import run_as_main

_PR_SET_PDEATHSIG = 1


class Standby:
    """The launcher's process in reserve. `prepare` starts it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: the variables that all ranks share. torch reads some of them when it is imported."""
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start the process, unless there is one."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchfleet.launch.ranks.standby"],
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
        is_module = told["command"][1] == "-m"
        target, *arguments = told["command"][2:] if is_module else told["command"][1:]
        run_as_main(target, arguments, is_module)


def _redirect(log: str) -> None:
    """Redirect the streams of this process as those of a rank: no input, and all output to the log."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    end = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(end, 1)
    os.dup2(end, 2)


if __name__ == "__main__":
    main()
