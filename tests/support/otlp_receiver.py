"""A collector of OpenTelemetry: a real HTTP server that decodes what OTLP exporters send."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.extras import OTLP, imported, needs


@dataclass
class Received:
    """Spans as (attributes of who sent it, the span); and where the receiver is."""

    endpoint: str
    spans: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)  # cleared: answers wait


@contextmanager
def receiver() -> Iterator[Received]:
    """Listens on loopback."""
    needs(OTLP)
    request = imported("opentelemetry.proto.collector.trace.v1.trace_service_pb2").ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
            received.hold.wait(30)
            for resource in request.FromString(data).resource_spans:
                who = {each.key: value_of(each.value) for each in resource.resource.attributes}
                received.spans += [(who, span) for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Received(f"http://127.0.0.1:{server.server_address[1]}")
    received.hold.set()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received
    finally:
        received.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


def value_of(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
