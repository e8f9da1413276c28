"""Predictions over HTTP without ASGI between the connection and the batch: no task, no queue of events, one write."""

from __future__ import annotations

import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from torchfleet.apps.serve.batching import QueueFull
from torchfleet.apps.serve.endpoints.bounded_http import BoundedProtocol
from torchfleet.apps.serve.endpoints.http_app import MAX_KEPT, ServingApp, sizes_of
from torchfleet.apps.serve.endpoints.inference_protocol import InferRequest
from torchfleet.apps.serve.inference import Refusal

MAX_DIRECT = 1 << 16  # bytes of a body; uvicorn reads larger ones piece by piece
_OTHERS = {b"expect", b"transfer-encoding", b"upgrade", b"content-encoding"}  # headers that uvicorn or the app handle


class DirectProtocol(BoundedProtocol):
    """A connection. All requests but plain requests for predictions go through uvicorn to the ServingApp."""

    cycle: Any  # uvicorn's RequestResponseCycle, or an Exchange
    limit_concurrency: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = self.limit_concurrency or 1 << 60
        self.limit_concurrency = None  # uvicorn would answer by itself: in plain text, and without being counted
        self._exchange: Exchange | None = None  # the last one

    def on_headers_complete(self) -> None:
        is_crowded = len(self.connections) > self._most or len(self.tasks) > self._most
        made = None if is_crowded else self._new_exchange()
        if made is None:
            self.scope["is_crowded"] = is_crowded
            super().on_headers_complete()
            return
        self._is_in_head, self._head_bytes = False, 0
        self.cycle = self._exchange = made
        if made.is_refused:
            made.release()
            made.receive(QueueFull())  # the body is dropped as it comes

    def on_body(self, body: bytes) -> None:
        if isinstance(self.cycle, Exchange):
            if not self.cycle.response_complete:
                self.cycle.parts.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, Exchange):
            self._is_reading = False
            if self.is_over:
                self.transport.close()
            elif not self.cycle.response_complete:
                self.cycle.begin()
        else:
            super().on_message_complete()

    def end(self) -> None:
        super().end()
        if self.is_over and self._exchange is not None:
            self._exchange.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._exchange is not None:
            self._exchange.leave()
        super().connection_lost(exc)

    def _new_exchange(self) -> Exchange | None:
        """The Exchange of a request that is answered directly; None for other requests."""
        app: ServingApp = self.app
        if self.url != app.infer_url or not self._is_plain():
            return None
        if not app.is_known_host(self.headers) or not app.is_admitted(self.headers):
            return None
        try:
            json_size, length = sizes_of(self.headers)
        except Refusal:
            return None
        if length is None or length > app.max_body:
            return None
        is_full = app.inference.is_full(length)
        if length > (MAX_KEPT if is_full else MAX_DIRECT) or not app.reserve(length):
            return None
        return Exchange(self, app, json_size, length, is_full)

    def _is_plain(self) -> bool:
        """Whether the request can be answered directly: no earlier one is open, the client reads, headers are plain."""
        before = self.cycle
        return (
            (before is None or before.response_complete)
            and not self.flow.write_paused
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and not any(name in _OTHERS for name, _ in self.headers)
            and not self.app.inference.model.is_remote
        )


class Exchange:
    """A request and its answer. Has the attributes of RequestResponseCycle that uvicorn uses."""

    def __init__(
        self, connection: DirectProtocol, app: ServingApp, json_size: int | None, length: int, is_refused: bool
    ) -> None:
        """`length`: bytes of the body, which `app` has reserved. `is_refused`: the queue is full."""
        self.parts: list[bytes] = []
        self.response_started = self.response_complete = self.disconnected = False
        self.keep_alive = connection.parser.should_keep_alive() and not connection.is_ending
        self.message_event = self  # uvicorn calls its `set` to wake the request's task; here there is no task
        self._connection, self._app, self._json_size = connection, app, json_size
        self._reserved, self.is_refused = length, is_refused
        self._scope = connection.scope
        self._scope["method"], self._scope["path"] = "POST", app.infer_path
        self._began = time.monotonic()
        self._request: InferRequest | None = None

    def set(self) -> None:
        """Stands in for asyncio.Event.set. Does nothing."""

    def begin(self) -> None:
        """Decode the complete body, and submit the request."""
        self.release()
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts = []
        try:
            self._request = self._app.inference.decode(body, self._json_size)
        except Exception as error:
            self.receive(error)
            return
        self._app.inference.submit_for(self._request, self)

    def is_waiting(self) -> bool:
        return not (self.response_complete or self._connection.transport.is_closing())

    def receive(self, result: Any) -> None:
        """Send the answer to a result, (version, outputs), or to an exception."""
        try:
            if isinstance(result, Exception):
                raise result
            assert self._request is not None
            status, body, headers = self._app.answer(self._request, str(result[0].number), result[1])
        except Exception as error:
            status, body, headers = self._app.failed(error, f"POST {self._app.infer_path}")
        if self._connection.transport.is_closing():
            self.leave()
            return
        self._send(status, body, headers)
        self._app.note(self._scope, status, time.monotonic() - self._began, len(body))

    def leave(self) -> None:
        """Called when the connection is closed. Logs a request that was not answered as one whose client left."""
        self.release()
        if not self.response_complete:
            self.response_complete = True
            self._app.note_left(self._scope, time.monotonic() - self._began)

    def release(self) -> None:
        """Release the memory that was reserved for the body."""
        self._app.release(self._reserved)
        self._reserved = 0

    def _send(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        connection = self._connection
        self.response_started = self.response_complete = True
        lines = [b"%b: %b\r\n" % header for header in headers]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"%b%bcontent-length: %d\r\n\r\n" % (STATUS_LINE[status], b"".join(lines), len(body))
        connection.transport.write(head + body)
        if not self.keep_alive:
            connection.end()
        connection.on_response_complete()
