"""The bounds of a listener for HTTP: connections, seconds and bytes of a request; routes, and its end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from torchfleet.base.monitor.http_listener import Bounds, HttpListener, HttpRequest, routes

GET = b"GET /here?x=1 HTTP/1.0\r\n\r\n"


def here(request: HttpRequest) -> tuple[int, str, bytes]:
    return 200, "text/plain", threading.current_thread().name.encode()


@contextlib.contextmanager
def listening(bounds: Bounds) -> Iterator[HttpListener]:
    listener = HttpListener(("127.0.0.1", 0), routes({"/here": here}), bounds, "the listener")
    listener.start()
    try:
        yield listener
    finally:
        listener.close()


def client_of(listener: HttpListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.server_port), timeout=20)


def ask(listener: HttpListener, request: bytes = GET) -> bytes:
    """The whole reply; what is left of it where the listener ended the connection."""
    found = b""
    with client_of(listener) as client, contextlib.suppress(ConnectionError):
        client.sendall(request)
        while data := client.recv(4096):
            found += data
    return found


def test_a_request_is_answered_by_a_thread_of_its_own() -> None:
    with listening(Bounds()) as listener:
        reply = ask(listener)
    assert reply.startswith(b"HTTP/1.0 200 ")
    assert not reply.endswith(b"\r\n\r\nthe listener")


@pytest.mark.parametrize(
    ("request_", "status"), [(b"GET / HTTP/1.0\r\n\r\n", 404), (b"PUT /here HTTP/1.0\r\n\r\n", 501)]
)
def test_other_paths_and_methods_are_refused(request_: bytes, status: int) -> None:
    with listening(Bounds()) as listener:
        assert ask(listener, request_).split()[1] == str(status).encode()


def test_a_request_of_too_many_bytes_is_not_answered() -> None:
    with listening(Bounds(request_bytes=1000)) as listener:
        long = GET[:-2] + b"X-Long: " + b"x" * 2000 + b"\r\n\r\n"
        assert b" 200 " not in ask(listener, long)
        assert b" 200 " in ask(listener)


def test_a_request_that_takes_too_long_is_dropped() -> None:
    with listening(Bounds(connections=1, request_seconds=0.3)) as listener, client_of(listener) as client:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun < 100:
                client.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - begun < 60
        listener.bounds = Bounds(connections=1)  # the next one may be slow
        assert b" 200 " in ask(listener)


def test_of_too_many_silent_connections_the_oldest_is_ended_and_told_so() -> None:
    with (
        listening(Bounds(connections=2)) as listener,
        client_of(listener) as first,
        client_of(listener) as second,
        client_of(listener) as third,
    ):
        assert b" 503 " in first.recv(100)
        second.sendall(GET)
        third.sendall(GET)
        assert (b" 200 " in second.recv(100), b" 200 " in third.recv(100)) == (True, True)


def test_silent_connections_do_not_keep_requests_out() -> None:
    with listening(Bounds(connections=4)) as listener, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(client_of(listener))
            assert ask(listener).startswith(b"HTTP/1.0 200 ")


def test_admitted_connections_stay_and_are_bounded() -> None:
    class Admitted(HttpRequest):
        def do_GET(self) -> None:
            if not self.admit():
                self.send(503, "text/plain", b"full")
                return
            self.begin(200, "text/plain")
            self.wfile.write(self.rfile.read(1))  # until the client says more

    bounds = Bounds(connections=2, admitted=2, request_seconds=60.0)
    listener = HttpListener(("127.0.0.1", 0), Admitted, bounds, "shares")
    listener.start()
    with contextlib.closing(listener), contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(client_of(listener)) for _ in range(2))
        for client in (first, second):
            client.sendall(GET)
            assert b" 200 " in client.recv(17)
        for _ in range(20):
            stack.enter_context(client_of(listener))
        last = stack.enter_context(client_of(listener))
        last.sendall(GET)
        assert b" 503 " in last.recv(17)
        for client in (first, second):
            client.sendall(b"x")
            assert _rest(client).endswith(b"x")


def _rest(client: socket.socket) -> bytes:
    found = b""
    while data := client.recv(4096):
        found += data
    return found


def test_silent_and_slow_connections_make_room_for_requests() -> None:
    """A probe of a scheduler is answered whatever others hold open, as long as they have not sent a request."""
    with listening(Bounds(connections=4, request_seconds=60.0)) as listener, contextlib.ExitStack() as open_ones:
        for number in range(40):
            silent = open_ones.enter_context(client_of(listener))
            if number % 2:
                silent.sendall(b"GET /here HTTP/1.0\r\nX-Slow: " + b"x" * number)
            if number % 8 == 7:
                assert ask(listener).startswith(b"HTTP/1.0 200 ")
        assert len(listener._silent) <= 4


def test_a_connection_too_many_beside_requests_under_way_is_told_so() -> None:
    going, done = threading.Semaphore(0), threading.Event()

    def slow(request: HttpRequest) -> tuple[int, str, bytes]:
        going.release()
        done.wait(20)
        return here(request)

    listener = HttpListener(("127.0.0.1", 0), routes({"/here": slow}), Bounds(connections=2), "the listener")
    listener.start()
    try:
        with client_of(listener) as first, client_of(listener) as second:
            for client in (first, second):
                client.sendall(GET)
            assert all(going.acquire(timeout=20) for _ in range(2))
            assert ask(listener).startswith(b"HTTP/1.0 503 ")
            done.set()
            assert first.recv(4096).startswith(b"HTTP/1.0 200 ")
    finally:
        done.set()
        listener.close()


def test_a_flood_of_requests_takes_a_tenth_of_the_process() -> None:
    """Of a listener that rests, in a process that has other work."""
    spent: list[float] = []

    def counting(request: HttpRequest) -> tuple[int, str, bytes]:
        spent.append(time.thread_time())
        while time.thread_time() - spent[-1] < 0.01:
            pass
        return here(request)

    listener = HttpListener(("127.0.0.1", 0), routes({"/here": counting}), Bounds(rests=True), "the listener")
    listener.start()
    try:
        started = time.monotonic()
        for _ in range(10):
            assert ask(listener).startswith(b"HTTP/1.0 200 ")
        assert time.monotonic() - started > 0.1 * 9 * 0.9  # nine rests between ten requests
    finally:
        listener.close()


def test_a_listener_that_was_never_started_closes() -> None:
    listener = HttpListener(("127.0.0.1", 0), routes({}), Bounds(), "idle")
    listener.close()
    assert listener.socket.fileno() == -1
