"""Exports spans to an OpenTelemetry collector by OTLP over HTTP, in the thread of its BatchSpanProcessor."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torchfleet.base.errors import RoleError
from torchfleet.base.extras import required
from torchfleet.base.tracing.span import HANDLE, HELD, REQUEST, STEP, Span, request_id, step_id, trace_id
from torchfleet.base.tracing.span_recorder import Recorder

VARIABLE = "FLEET_TRACE_EVERY"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_LAST = 5.0  # seconds that a process waits for the last export when it ends


def trace_every(found: Mapping[str, str] = os.environ) -> int:
    """The environment's trace interval n: one step in n is traced; 0: none. Raises RoleError."""
    text = found.get(VARIABLE) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RoleError(f"{VARIABLE} must be a number of steps, 0 for no traces; found {text!r}")
    return int(text)


class OtlpExport:
    """Exports the spans of its recorder with OpenTelemetry's BatchSpanProcessor, which has a queue and a thread.

    The processor reads its own variables (OTEL_BSP_MAX_QUEUE_SIZE etc.). When its queue is full, it drops the oldest
    spans.
    """

    def __init__(self, role: str, index: int, origin: int = 0) -> None:
        """Raises MissingPackage if opentelemetry is not installed."""
        exporting = required(EXPORTER, VARIABLE, "otel")
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = _Exporter(exporting.OTLPSpanExporter(), _resource(role, index))
        self._processor = BatchSpanProcessor(cast(Any, self._exporter))
        self.recorder = _Forwarding(self._processor.on_end, origin)

    @property
    def num_exported(self) -> int:
        """The number of spans that the collector has accepted."""
        return self._exporter.num_exported

    def close(self) -> str:
        """Export the remaining spans, for a few seconds at most. Returns a description of what was lost, or an empty
        string.
        """
        ending = threading.Thread(target=self._processor.shutdown, name="end of OTLP export", daemon=True)
        ending.start()
        ending.join(_LAST)
        if ending.is_alive():  # shutting down an exporter aborts its current export
            self._exporter.shutdown()
        lost = self.recorder.num_forwarded - self.num_exported
        if not lost:
            return ""
        return (
            f"traces: {lost:,} of {lost + self.num_exported:,} spans did not reach the collector. Is it there "
            "(OTEL_EXPORTER_OTLP_ENDPOINT), and fast enough? Trace fewer steps with a larger FLEET_TRACE_EVERY, or let "
            "more spans wait with a larger OTEL_BSP_MAX_QUEUE_SIZE."
        )


class _Queued(NamedTuple):
    """A span in the processor's queue, which reads only the context's flags. Creating a ReadableSpan takes ten times as
    long, so the exporting thread creates it.
    """

    span: Span
    context: Any


class _Forwarding(Recorder):
    """Forwards its spans and keeps none."""

    def __init__(self, forward: Callable[[Any], None], origin: int) -> None:
        from opentelemetry.trace import SpanContext, TraceFlags

        super().__init__(origin)
        self._forward = forward
        self._sampled = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        self.num_forwarded, self._counting = 0, threading.Lock()

    def add(self, span: Span) -> None:
        with self._counting:
            self.num_forwarded += 1
        self._forward(_Queued(span, self._sampled))


class _Exporter:
    """A SpanExporter that counts exported spans. Converts spans to opentelemetry's type in the processor's thread."""

    def __init__(self, exporter: Any, resource: Any) -> None:
        self._exporter, self._resource = exporter, resource
        self.num_exported = 0

    def export(self, batch: Sequence[_Queued]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        sent = self._exporter.export([readable(queued.span, self._resource) for queued in batch])
        if sent is SpanExportResult.SUCCESS:
            self.num_exported += len(batch)
        return sent

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def _resource(role: str, index: int) -> Any:
    """Identifies this process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES extend or override it."""
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
    """Convert a span to the type that opentelemetry's exporters take."""
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
    """(span id, parent's span id or 0)."""
    if span.kind == STEP:
        return step_id(span.origin, span.trace), 0
    if span.kind == REQUEST:
        return request_id(span.client, span.call), step_id(span.origin, span.trace)
    parent = request_id(span.client, span.call) if span.kind in (HANDLE, HELD) else step_id(span.origin, span.trace)
    return secrets.randbits(63) | 1, parent
