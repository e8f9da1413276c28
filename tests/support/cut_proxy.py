"""A TCP proxy in front of an HTTP server, which cuts a connection, or stops passing bytes on, within one upload."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

SECONDS = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)


class CutProxy:
    """Of every upload whose address ends with `name`, from number `first` on, only `num_bytes` of the body arrive.

    `holds`: the connection stays open and `is_held` is set; else it is cut at once.
    """

    def __init__(
        self, address: tuple[str, int], name: str, num_bytes: int, first: int = 1, holds: bool = False
    ) -> None:
        self._address, self._name, self._num_bytes, self._holds = address, name.encode(), num_bytes, holds
        self._num_left = first
        self.num_cut, self.is_held, self._over = 0, threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        with _ending(self._listener):
            pass

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._address, SECONDS)
                client.settimeout(SECONDS)
                threading.Thread(target=self._pass_requests, args=(client, server), daemon=True).start()
                threading.Thread(target=_pump, args=(server, client), daemon=True).start()

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), _ending(client), _ending(server), client.makefile("rb") as stream:
            while True:
                head = b""
                while (line := stream.readline()) not in (b"\r\n", b""):
                    head += line
                if not line:
                    return
                found = _LENGTH.search(b"\r\n" + head)
                length = int(found[1]) if found else 0
                is_cut = self._is_chosen(head)
                server.sendall(head + b"\r\n")
                server.sendall(stream.read(min(length, self._num_bytes) if is_cut else length))
                if is_cut:
                    self.is_held.set()
                    self._over.wait(SECONDS if self._holds else 0)
                    return

    def _is_chosen(self, head: bytes) -> bool:
        method, address, *_ = head.split(b" ")
        if method != b"PUT" or not address.endswith(self._name):
            return False
        self._num_left -= 1
        self.num_cut += self._num_left <= 0
        return self._num_left <= 0


@contextlib.contextmanager
def _ending(connection: socket.socket) -> Iterator[None]:
    """Closed at the end, also while another thread waits for it."""
    with connection:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


@contextlib.contextmanager
def cut_proxy(
    address: tuple[str, int], name: str, num_bytes: int, first: int = 1, holds: bool = False
) -> Iterator[CutProxy]:
    made = CutProxy(address, name, num_bytes, first, holds)
    try:
        yield made
    finally:
        made.close()
