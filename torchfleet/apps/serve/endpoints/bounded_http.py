"""uvicorn's HTTP protocol with bounds: the size of a request's head, and the time in which a request must arrive."""

from __future__ import annotations

from asyncio import TimerHandle
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

LAST_WAIT = 2.0  # seconds that a connection without a request stays open when the process ends
MAX_HEAD = 1 << 16  # bytes of the request line and all headers
MAX_DROPPED = 1 << 26  # bytes of a refused request that are read, so that the client reads the answer
_DIGITS = frozenset(b"0123456789abcdefABCDEF")
_LINE = 64  # bytes of the line with a chunk's size that are looked at


class _Answering:
    """What a request's answer is written to: to close it is to end the connection properly."""

    def __init__(self, connection: BoundedProtocol) -> None:
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing
        self.close = connection.end


class BoundedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """A connection. Slow or endless requests get 408 or 431, and the connection is closed."""

    request_seconds = 10.0  # of this process, set before it listens

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._is_reading = False  # a request has begun and is not complete
        self._is_in_head = False
        self._clock: TimerHandle | None = None
        self.is_over = False  # nothing is answered any more; what comes is dropped
        self._num_dropped = 0
        self._in_chunk = -1  # bytes of the chunk that is being read; -1: none
        self._is_new_chunk = False  # its size is not known yet
        self._tail = b""  # the end of what came before
        self.is_ending = False  # the process ends: the next answer is the connection's last
        self._last_wait: TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        if self._last_wait is not None:
            self._last_wait.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_dropped(data):
            return
        if self._is_in_head or not self._is_reading:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.is_over:
            return
        if self._in_chunk >= 0 or self._tail:
            self._check_chunk(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD:
            self._refuse(431, f"expected at most {MAX_HEAD} bytes of headers")
        elif not self._is_reading:
            self._head_bytes = 0
            self._stop_clock()
        elif self._clock is None:
            self._start_clock()

    def _is_dropped(self, data: bytes) -> bool:
        if self.is_over:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_DROPPED:
                self.transport.close()
        return self.is_over

    def on_message_begin(self) -> None:
        self._is_reading = self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        super().on_headers_complete()
        self.cycle.transport = _Answering(self)
        if self.is_ending:
            self.cycle.keep_alive = False
        if any(name == b"transfer-encoding" for name, _ in self.headers):
            self._tail = b"\n"

    def on_chunk_header(self) -> None:
        self._in_chunk, self._is_new_chunk = 0, True

    def on_chunk_complete(self) -> None:
        self._in_chunk = -1

    def on_body(self, body: bytes) -> None:
        if self._in_chunk >= 0:
            self._in_chunk += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_reading, self._tail = False, b""
        if self.is_over:
            self.transport.close()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.is_over:
            self.server_state.total_requests += 1
        else:
            super().on_response_complete()

    def end(self) -> None:
        """Close the connection when the answer is sent. If the request is still coming, its rest is read and dropped,
        as much as may come: a connection that is closed with unread data is reset, and the client may lose the answer.
        """
        if self.is_over or not self._is_reading or self.transport.is_closing():
            self.transport.close()
            return
        self.is_over = True
        self._stop_clock()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._last_wait = self.loop.call_later(self.request_seconds, self.transport.close)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def shutdown(self) -> None:
        """Called by uvicorn when the process is to end. A connection without a request stays for LAST_WAIT seconds: one
        may be on its way, and is answered with `Connection: close`.
        """
        self.is_ending = self.app.inference.is_ending = True
        if self.is_over:
            self.transport.close()
        elif self._is_idle():
            self._last_wait = self.loop.call_later(LAST_WAIT, self._close_idle)
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def _close_idle(self) -> None:
        if self._is_idle():
            self.transport.close()

    def _is_idle(self) -> bool:
        return not self._is_reading and (self.cycle is None or self.cycle.response_complete)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _check_chunk(self, data: bytes) -> None:
        """Refuse a chunk that is said to be larger than a request may be: its end need not be waited for."""
        if self._is_new_chunk and self._in_chunk >= 0:
            before = self._tail + data
            *_, line = before[: len(before) - self._in_chunk].rstrip(b"\r\n")[-_LINE:].split(b"\n")
            digits = line.split(b";")[0].strip()
            if len(digits) <= 16 and set(digits) <= _DIGITS and int(digits or b"0", 16) > self.app.max_body:
                self._refuse(413, self.app.too_large_text)
                return
        self._is_new_chunk = False
        if self._is_reading:
            self._tail = b"\n" if self._in_chunk >= 0 else (self._tail + data)[-_LINE:]

    def _start_clock(self) -> None:
        self._clock = self.loop.call_later(self.request_seconds, self._too_slow)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_slow(self) -> None:
        self._clock = None
        self._refuse(408, f"expected a whole request within {self.request_seconds:g} seconds")

    def _refuse(self, status: int, text: str) -> None:
        """Answer without the application, and close the connection."""
        if self.is_over or self.transport.is_closing():
            return
        if self._is_reading and not self._is_in_head and self.cycle.response_complete:  # this request has its answer
            self.transport.close()
            return
        body = msgspec.json.encode({"error": text})
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._note_refused(status, len(body))
        if status == 408:
            self.transport.close()
        else:
            self.end()

    def _note_refused(self, status: int, num_bytes: int) -> None:
        """Count and log it. A request whose head is complete is noted by its cycle, when the connection is lost."""
        if self._is_reading and not self._is_in_head:
            self.scope["refused"] = status, num_bytes
        elif self._is_reading or status != 408:  # on a connection that is idle, nothing was asked
            path = self.url.decode("ascii", "replace") if self._is_in_head else ""
            self.app.note({"client": self.client, "method": "", "path": path}, status, 0.0, num_bytes)
