"""A small HTTP server that no client can hold up: so many connections, so long for a request, so long for a reply."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn
from typing import Any, cast

from torchfleet.base.monitor.http_listener import HttpListener

MOST_CONNECTIONS = 64
REQUEST_SECONDS = 10.0  # for all of a request
REPLY_SECONDS = 10.0  # for one write: who reads more slowly is dropped
_REFUSAL = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedServer(ThreadingMixIn, HttpListener):
    """One thread per connection, and a bounded number of them. A connection more is told so and closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], handler: type[BoundedHandler]) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            request.settimeout(0.1)
            with contextlib.suppress(OSError):  # it is gone, or does not read
                request.sendall(_REFUSAL)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class BoundedHandler(BaseHTTPRequestHandler):
    """One request per connection. What is built in says little: no version, no echo of the request."""

    timeout = REPLY_SECONDS
    server_version, sys_version = "fleet", ""
    error_message_format, error_content_type = "%(code)d %(message)s\n", "text/plain"

    def setup(self) -> None:
        super().setup()
        self.rfile = cast(Any, io.BufferedReader(_InTime(self.connection, REQUEST_SECONDS)))

    def log_message(self, format: str, *arguments: Any) -> None:
        """Lines about requests would drown those of the job."""


class _InTime(io.RawIOBase):
    """Reads from a socket until a moment, however the bytes drip."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(REPLY_SECONDS)
