"""The health port of a member: whether its script lives, and whether it has begun, for a scheduler that asks by HTTP.

GET /healthz    200 while the script runs and, of a server, its loop turns; else 503
GET /readyz     200 once a server serves, or a worker trains; else 503
"""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.foreground import Running

STUCK = 60.0  # seconds without a turn of a server's loop: it writes its status twice a second
_PATIENCE = 5.0  # seconds that a client may take for its request


class HealthPort:
    """Serves the port from a thread until it is left as a context. Port 0: it does nothing."""

    def __init__(self, port: int, status_file: Path, is_server: bool) -> None:
        self._status_file, self._is_server = status_file, is_server
        self._child: Running | None = None
        self._listener: ThreadingHTTPServer | None = None
        if not port:
            return
        try:  # every interface: who asks is outside of a container
            self._listener = ThreadingHTTPServer(("", port), _handler(self))
        except OSError as error:
            raise RoleError(f"the health port {port} (FLEET_HEALTH_PORT) cannot be opened: {error}") from None
        self._listener.daemon_threads = True

    def __enter__(self) -> HealthPort:
        if self._listener is not None:
            threading.Thread(target=self._listener.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()

    def watch(self, child: Running) -> None:
        """From now on it is this child that is asked about."""
        self._child = child

    def answer(self, path: str) -> tuple[int, str]:
        """The status and the word for a path."""
        if path == "/healthz":
            return (200, "ok") if self._is_healthy() else (503, "stuck or ended")
        if path == "/readyz":
            return (200, "ok") if self._is_healthy() and self._age() is not None else (503, "starting")
        return 404, "no such path"

    def _is_healthy(self) -> bool:
        if self._child is None:
            return True  # it is about to start
        age = self._age()
        is_stuck = self._is_server and age is not None and age > STUCK
        return self._child.returncode is None and not is_stuck

    def _age(self) -> float | None:
        """Seconds since the last status of the script; None: it has written none."""
        try:
            return time.time() - self._status_file.stat().st_mtime
        except OSError:
            return None


def _handler(health: HealthPort) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE
        server_version, sys_version = "fleet", ""

        def do_GET(self) -> None:
            status, word = health.answer(self.path)
            body = word.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """A line for every probe would drown those of the script."""

    return Handler
