"""Spans to an OpenTelemetry collector, by OTLP over HTTP, from a thread of its own."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torchfleet.base.errors import RoleError
from torchfleet.base.extras import required
from torchfleet.base.tracing.span import HANDLE, HELD, REQUEST, STEP, Span, request_id, step_id, trace_id
from torchfleet.base.tracing.span_recorder import Recorder

VARIABLE = "FLEET_TRACE_EVERY"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_PERIOD = 1.0  # seconds between two exports
_BATCH = 512  # spans of one message
_QUEUED = 20_000  # spans that wait for a collector; later ones are dropped and counted
_LAST = 5.0  # seconds that the end of a process waits for the last export


def trace_every(found: Mapping[str, str] = os.environ) -> int:
    """One step of how many is traced, as the environment says it; 0: none is. Raises RoleError."""
    text = found.get(VARIABLE) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RoleError(f"{VARIABLE} must be a number of steps, 0 for no traces; found {text!r}")
    return int(text)


class OtlpExport:
    """Takes spans from a recorder and sends them. What training sees of it is a deque that spans are appended to."""

    def __init__(self, role: str, index: int, origin: int = 0) -> None:
        """Raises MissingPackage if opentelemetry is not there."""
        exporting = required(EXPORTER, VARIABLE, "otel")
        self.recorder = Recorder(origin, limit=_QUEUED)
        self._exporter = exporting.OTLPSpanExporter()  # reads OTEL_EXPORTER_OTLP_ENDPOINT and its like
        self._resource = _resource(role, index)
        self._is_over = threading.Event()
        self.num_exported = self.num_failed = 0
        self._thread = threading.Thread(target=self._run, name="OTLP export", daemon=True)
        self._thread.start()

    def close(self) -> str:
        """Send what is left, for some seconds at most. Returns what was lost, in words, or nothing."""
        self._is_over.set()
        self._thread.join(_LAST)
        self._exporter.shutdown()
        lost = self.recorder.num_dropped + self.num_failed
        if not lost:
            return ""
        return (
            f"traces: {lost:,} of {lost + self.num_exported:,} spans did not reach the collector. Is it there "
            "(OTEL_EXPORTER_OTLP_ENDPOINT), and fast enough? Trace fewer steps with a larger FLEET_TRACE_EVERY."
        )

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_PERIOD)
            spans = self.recorder.take()
            for start in range(0, len(spans), _BATCH):
                self._send(spans[start : start + _BATCH])

    def _send(self, spans: Sequence[Span]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        sent = self._exporter.export([readable(span, self._resource) for span in spans])
        if sent is SpanExportResult.SUCCESS:
            self.num_exported += len(spans)
        else:
            self.num_failed += len(spans)


def _resource(role: str, index: int) -> Any:
    """Who speaks. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add to it, or take its place."""
    from opentelemetry.sdk.resources import Resource

    own: dict[str, str | int] = {
        "service.instance.id": f"{role}-{index}",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    if not os.environ.get("OTEL_SERVICE_NAME"):
        own["service.name"] = f"torchfleet-{role}"
    return Resource.create(own)


def readable(span: Span, resource: Any) -> Any:
    """The span as opentelemetry's exporters take it."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

    kinds = {REQUEST: SpanKind.CLIENT, HANDLE: SpanKind.SERVER}
    whole, (own, parent) = trace_id(span.origin, span.trace), _place(span)
    is_remote = span.kind in (HANDLE, HELD)

    def context(number: int, is_remote: bool = False) -> SpanContext:
        return SpanContext(whole, number, is_remote, TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        name=span.name,
        context=context(own),
        parent=context(parent, is_remote) if parent else None,
        resource=resource,
        attributes={f"fleet.{name}": value for name, value in {"kind": span.kind, **span.more}.items()},
        kind=kinds.get(span.kind, SpanKind.INTERNAL),
        start_time=span.start,
        end_time=span.end,
    )


def _place(span: Span) -> tuple[int, int]:
    """(its identity, that of its parent, or 0)."""
    if span.kind == STEP:
        return step_id(span.origin, span.trace), 0
    if span.kind == REQUEST:
        return request_id(span.client, span.call), step_id(span.origin, span.trace)
    parent = request_id(span.client, span.call) if span.kind in (HANDLE, HELD) else step_id(span.origin, span.trace)
    return secrets.randbits(63) | 1, parent
