"""The health port of a member: tells a scheduler over HTTP whether the script is alive and whether it is ready.

GET /healthz    200 while the script runs and, for a server, its loop makes progress; else 503
GET /readyz     200 once a server serves, a backup has all rows, or a worker trains; else 503
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.http_listener import Bounds, HttpListener, HttpRequest, routes
from torchfleet.launch.clusters.foreground import Running

STUCK = 60.0  # seconds without an iteration of a server's loop, which writes the status twice a second
_OK = 200, "text/plain", b"ok"
_BOUNDS = Bounds(connections=256, request_seconds=5.0, reply_seconds=5.0, request_bytes=8192)


class HealthPort:
    """Serves the port from a thread until the context exits. With port 0 it does nothing."""

    def __init__(self, port: int, status_file: Path, is_server: bool) -> None:
        self._status_file, self._is_server = status_file, is_server
        self._child: Running | None = None
        self._listener: HttpListener | None = None
        if not port:
            return
        try:  # every interface: probes come from outside the container
            paths = routes({"/healthz": self._health, "/readyz": self._readiness})
            self._listener = HttpListener(("", port), paths, _BOUNDS, "health port")
        except OSError as error:
            raise RoleError(f"the health port {port} (FLEET_HEALTH_PORT) cannot be opened: {error}") from None

    def __enter__(self) -> HealthPort:
        if self._listener is not None:
            self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()

    def watch(self, child: Running) -> None:
        """Report the health of this child from now on."""
        self._child = child

    def _health(self, request: HttpRequest) -> tuple[int, str, bytes]:
        return _OK if self._is_healthy() else (503, "text/plain", b"stuck or ended")

    def _readiness(self, request: HttpRequest) -> tuple[int, str, bytes]:
        is_ready = self._is_healthy() and self._age() is not None and self._is_in_step()
        return _OK if is_ready else (503, "text/plain", b"starting")

    def _is_healthy(self) -> bool:
        if self._child is None:
            return True  # the script is about to start
        age = self._age()
        is_stuck = self._is_server and age is not None and age > STUCK
        return self._child.returncode is None and not is_stuck

    def _is_in_step(self) -> bool:
        """False for a backup that does not have all rows yet: until then its primary must not be evicted."""
        try:
            found = json.loads(self._status_file.read_text())
        except (OSError, ValueError):
            return True  # a status that cannot be read says nothing against the server
        return not isinstance(found, dict) or found.get("in_step") is not False

    def _age(self) -> float | None:
        """Return the seconds since the script last wrote its status; None if it has written none."""
        try:
            return time.time() - self._status_file.stat().st_mtime
        except OSError:
            return None
