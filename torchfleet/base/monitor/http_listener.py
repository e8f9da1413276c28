"""An HTTP listener that no client can block. Metrics, the dashboard and the health port are routes of one.

It limits the number of concurrent connections, the time for a request and for a write of its reply, and the size of a
request. At the limit of connections, the oldest one without a complete request is ended for the next. Connections
that a handler admits have a limit of their own. It makes no DNS lookups, and does not report clients that disconnect.
"""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, cast

from torchfleet.base.monitor.host_names import HostNames
from torchfleet.base.monitor.notices import tell

_REFUSAL = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_LOOK = 0.2  # seconds between two checks whether the listener was closed
_REST = 9  # with `rests`: seconds of rest for each second of processor time


@dataclass(frozen=True)
class Bounds:
    """Limits on what clients may use of a listener."""

    connections: int = 64  # concurrent, one thread each
    admitted: int = 64  # in addition to these: connections for which a handler has called `admit`
    request_seconds: float = 10.0  # for a whole request
    reply_seconds: float = 10.0  # for one write: a client that reads more slowly is dropped
    request_bytes: int = 1 << 16
    rests: bool = False  # all requests together take at most a tenth of a core: a flood waits


class HttpListener(ThreadingMixIn, HTTPServer):
    """Listens on IPv4 or IPv6, according to the address. Raises OSError if the address cannot be bound."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32
    _has_told = False

    def __init__(self, address: tuple[str, int], handler: type[HttpRequest], bounds: Bounds, name: str) -> None:
        self.bounds = bounds
        self._lock = threading.Lock()
        self._used = 0.0  # processor time of requests that ended and were not rested for
        self._silent: dict[Any, None] = {}  # connections whose request is not complete, oldest first
        self._heard: set[Any] = set()  # connections whose request is complete
        self._admitted: set[Any] = set()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(_LOOK,), name=name, daemon=True)

    def start(self) -> None:
        """Serve from a daemon thread until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Does not wait for requests in progress."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without the lookup of this machine's name that HTTPServer makes, which may wait for a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.bounds.rests:
            with self._lock:
                used, self._used = self._used, 0.0
            time.sleep(_REST * used)
        started = time.thread_time()
        if self._has_room():
            with self._lock:
                self._silent[request] = None
            super().process_request(request, client_address)
        else:
            _refuse(request)
            self.shutdown_request(request)
        self._charge(time.thread_time() - started)

    def _has_room(self) -> bool:
        """Whether there is room for another connection. At the limit, ends the oldest without a complete request."""
        with self._lock:
            if len(self._silent) + len(self._heard) < self.bounds.connections:
                return True
            oldest = next(iter(self._silent), None)
            self._silent.pop(oldest, None)
        if oldest is None:
            return False
        _refuse(oldest)
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread then ends and closes the connection
        return True

    def heard(self, request: Any) -> None:
        """Note that the request of this connection is complete: the connection is not ended for others."""
        with self._lock:
            if request in self._silent:
                del self._silent[request]
                self._heard.add(request)

    def admit(self, request: Any) -> bool:
        """Count a connection as admitted, no longer for `connections`. False if too many are, or if it was ended."""
        with self._lock:
            if request not in self._heard or len(self._admitted) >= self.bounds.admitted:
                return False
            self._heard.discard(request)
            self._admitted.add(request)
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._silent.pop(request, None)
                self._heard.discard(request)
                self._admitted.discard(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            super().finish_request(request, client_address)
        finally:
            self._charge(time.thread_time())  # of this thread, which began with the request

    def _charge(self, seconds: float) -> None:
        with self._lock:
            self._used += seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of ours once. A client that disconnected or was too slow is not reported."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError) and not self._has_told:
            self._has_told = True
            tell(f"port {self.server_port}: a request could not be answered: {error!r:.500}")


def _refuse(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client is gone, or does not read
        connection.send(_REFUSAL, socket.MSG_DONTWAIT)


class HttpRequest(BaseHTTPRequestHandler):
    """One request per connection. The replies of the base class reveal little: no version, no echo of the request."""

    server_version, sys_version = "fleet", ""
    error_message_format, error_content_type = "%(code)d %(message)s\n", "text/plain"

    def setup(self) -> None:
        bounds = cast(HttpListener, self.server).bounds
        super().setup()
        self.connection.settimeout(bounds.reply_seconds)
        self.rfile = cast(Any, io.BufferedReader(_InTime(self.connection, bounds)))

    def admit(self) -> bool:
        """Count this connection as admitted: it no longer counts for `connections`. False if too many are admitted."""
        return cast(HttpListener, self.server).admit(self.request)

    def parse_request(self) -> bool:
        """As the base class, which returns when all headers have arrived: the request is then complete."""
        is_valid = super().parse_request()
        cast(HttpListener, self.server).heard(self.connection)
        return is_valid

    def send(self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete reply."""
        self.begin(status, content_type, {"Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def begin(self, status: int, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Send the header of a reply. The caller then writes the body to `wfile`."""
        self.send_response(status)
        for name, value in {"Content-Type": content_type, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: lines about requests would drown out those of the job."""


Route = Callable[[HttpRequest], tuple[int, str, bytes]]  # the status, the content type, the body


def routes(found: Mapping[str, Route], names: HostNames | None = None) -> type[HttpRequest]:
    """A handler that answers GET on these paths. Other paths get 404, other methods 501, and with `names` requests to
    another name 421.
    """

    class Routed(HttpRequest):
        def do_GET(self) -> None:
            route = found.get(self.path.partition("?")[0])
            host = self.headers.get("Host")  # every browser sends it
            if names is not None and host and not names.is_known(host):
                self.send(421, "text/plain", b"this is not a name of this machine: use its address in numbers\n")
            elif route is None:
                self.send(404, "text/plain", f"no such path; there is {', '.join(found)}\n".encode())
            else:
                self.send(*route(self))

    return Routed


class _InTime(io.RawIOBase):
    """Reads from a socket until a deadline, however slowly bytes arrive, and limits the number of bytes."""

    def __init__(self, connection: socket.socket, bounds: Bounds) -> None:
        self._connection, self._end = connection, time.monotonic() + bounds.request_seconds
        self._left, self._reply_seconds = bounds.request_bytes, bounds.reply_seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the request took too long")
        if not self._left:
            raise ConnectionAbortedError("the request has too many bytes")
        self._connection.settimeout(seconds)
        try:
            num = self._connection.recv_into(memoryview(buffer)[: self._left])
        finally:
            self._connection.settimeout(self._reply_seconds)
        self._left -= num
        return num
