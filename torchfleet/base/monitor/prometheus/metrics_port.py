"""The port from which Prometheus scrapes a process's metrics: GET /metrics, read-only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torchfleet.base.errors import RoleError
from torchfleet.base.extras import required
from torchfleet.base.monitor.host_names import HostNames
from torchfleet.base.monitor.http_listener import Bounds, HttpListener, HttpRequest, routes
from torchfleet.base.monitor.prometheus.exposition import Exposition, Published
from torchfleet.base.monitor.prometheus.step_times import StepTimes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PORT, HOST = "FLEET_METRICS_PORT", "FLEET_METRICS_HOST"
LOOPBACK = "127.0.0.1"
# A silent client makes room for the next one: it must not keep others from scraping.
BOUNDS = Bounds(connections=8, request_seconds=2.0, reply_seconds=2.0, request_bytes=8192, rests=True)


class MetricsPort:
    """Serves from a daemon thread until it is closed. The thread that trains calls `publish` and `step_made`."""

    def __init__(self, host: str, port: int, labels: Mapping[str, str]) -> None:
        self._steps = StepTimes()
        self._exposition = Exposition(labels, self._steps)
        registry = _registry(self._exposition)
        try:
            names = HostNames(host, takes_any_beyond_loopback=True)
            paths = routes({"/metrics": partial(_answer, registry)}, names)
            self._listener = HttpListener((host, port), paths, BOUNDS, "metrics port")
        except OSError as error:
            raise RoleError(
                f"the metrics port {host}:{port} ({PORT}) cannot be opened: {error}. Give another --metrics_port, or "
                "end what has it."
            ) from None
        self.port = self._listener.server_port  # the actual port, if 0 was requested
        self.step_made = self._steps.note
        self._listener.start()

    def publish(self, status: Mapping[str, Any]) -> None:
        """Publish a status. The port takes ownership of `status`."""
        self._exposition.published = Published(status)

    def close(self) -> None:
        self._listener.close()


def open_metrics_port(role: str, index: int, replica: int = 0) -> MetricsPort | None:
    """Open the port that FLEET_METRICS_PORT names; None if it is not set. Raises RoleError."""
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


def _answer(registry: CollectorRegistry, request: HttpRequest) -> tuple[int, str, bytes]:
    from prometheus_client.exposition import choose_encoder

    encode, kind = choose_encoder(request.headers.get("Accept", ""))
    return 200, kind, encode(registry)
