"""Starts a server process on this machine and waits until it is ready."""

from __future__ import annotations

import selectors
import subprocess
import sys
import time
from types import TracebackType

from torchfleet.base.errors import FleetError

_ANNOUNCEMENT = "listening on "


class ServerProcess:
    """A running `python -m torchfleet.server`; ends it when closed or left as a context."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", *options: str, timeout: float = 120.0) -> None:
        command = [sys.executable, "-m", "torchfleet.server", "--endpoint", endpoint, *options]
        self._process = self._start(command)
        self.pid = self._process.pid
        try:
            self.endpoint = self._wait_for_announcement(timeout)
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float) -> int:
        """Wait until the process ends by itself, and return its exit status."""
        return self._process.wait(timeout)

    def kill(self) -> None:
        """Kill the process (SIGKILL), as a crash would."""
        self._process.kill()
        self._process.wait()

    def close(self, timeout: float = 10.0) -> None:
        """Terminate the process (SIGTERM); kill it if it has not ended after `timeout` seconds."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._process.stdout:
            self._process.stdout.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for_announcement(self, timeout: float) -> str:
        assert self._process.stdout
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise FleetError(f"the server process {self.pid} is not ready after {timeout:g} s")
        line = self._process.stdout.readline()
        if not line.startswith(_ANNOUNCEMENT):
            raise FleetError(f"the server process ended with status {self._process.wait(10)}; its error is above")
        return line.removeprefix(_ANNOUNCEMENT).strip()
