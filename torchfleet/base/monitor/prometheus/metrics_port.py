"""The port on which a process gives its metrics to Prometheus: GET /metrics, read-only, one request at a time."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from torchfleet.base.errors import RoleError
from torchfleet.base.extras import required
from torchfleet.base.monitor.http_listener import HttpListener
from torchfleet.base.monitor.prometheus.exposition import Exposition, Published
from torchfleet.base.monitor.prometheus.step_times import StepTimes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PORT, HOST = "FLEET_METRICS_PORT", "FLEET_METRICS_HOST"
LOOPBACK = "127.0.0.1"
_PATIENCE = 2.0  # seconds for a request to come, and for its reply to go
_MOST_HEAD = 8192  # bytes of a request


class MetricsPort:
    """Serves from a daemon thread until it is closed. The thread that trains calls `publish` and `step_made`."""

    def __init__(self, host: str, port: int, labels: Mapping[str, str]) -> None:
        self._steps = StepTimes()
        self._exposition = Exposition(labels, self._steps)
        registry = _registry(self._exposition)
        try:
            # One request at a time, so that scrapes cost the process one thread, however many come.
            self._listener = HttpListener((host, port), _handler(registry))
        except OSError as error:
            raise RoleError(
                f"the metrics port {host}:{port} ({PORT}) cannot be opened: {error}. Give another --metrics_port, or "
                "end what has it."
            ) from None
        self.port: int = self._listener.server_address[1]  # the one it has, if 0 was asked for
        self.step_made = self._steps.note
        self._thread = threading.Thread(target=self._listener.serve_forever, name="metrics port", daemon=True)
        self._thread.start()

    def publish(self, status: Mapping[str, Any]) -> None:
        """`status` belongs to the port from now on."""
        self._exposition.published = Published(status)

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()


def open_metrics_port(role: str, index: int, replica: int = 0) -> MetricsPort | None:
    """The port that FLEET_METRICS_PORT asks for; None if it is not set. Raises RoleError."""
    text = os.environ.get(PORT)
    if not text:
        return None
    labels = {"role": role, "index": str(index), **({"replica": str(replica)} if replica else {})}
    return MetricsPort(os.environ.get(HOST) or LOOPBACK, port_of(text, PORT), labels)


def port_of(text: str, source: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 1 << 16):
        raise RoleError(f"{source} must be a port from 1 to 65535, found {text!r}")
    return int(text)


def _registry(exposition: Exposition) -> CollectorRegistry:
    client = required("prometheus_client", f"a metrics port ({PORT})", "prometheus")
    registry: CollectorRegistry = client.CollectorRegistry()
    registry.register(exposition)
    client.ProcessCollector(registry=registry)
    return registry


def _handler(registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    from prometheus_client.exposition import choose_encoder

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "fleet", ""

        def setup(self) -> None:
            """The head of the request is read under one deadline: a slow client keeps the others waiting no longer."""
            super().setup()
            self.rfile = io.BufferedReader(io.BytesIO(_head(self.connection)))
            self.connection.settimeout(_PATIENCE)  # for all of the reply

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self._reply(404, "text/plain", b"the metrics are at /metrics\n")
                return
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._reply(200, kind, encode(registry))

        def _reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """A line for every scrape would drown those of the script."""

    return Handler


def _head(connection: socket.socket) -> bytes:
    """What a client sends up to the empty line, or as much as is taken. Raises TimeoutError if it takes too long."""
    deadline, head = time.monotonic() + _PATIENCE, b""
    while b"\r\n\r\n" not in head and len(head) < _MOST_HEAD:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request is too slow")
        connection.settimeout(left)
        data = connection.recv(_MOST_HEAD - len(head))
        if not data:
            break
        head += data
    return head
