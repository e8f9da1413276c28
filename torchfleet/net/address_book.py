"""Addresses of servers that moved. A server keeps the name host:port that it had at first; a file says where it is now.

A cluster may start a server again on another machine. Whoever started it writes the new address into a file beside
every process of the job. Clients look into it whenever they connect anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torchfleet.net.keys import KeyFolder
from torchfleet.net.sockets import Listener, SocketChannel
from torchfleet.net.wire import Role

SCHEME = "book"
_SEPARATOR = "#"  # between the path of the file and the server's name


def endpoint_in(book: str, place: str) -> str:
    """The endpoint that stands for `place`, wherever the file `book` says that it is."""
    return f"{SCHEME}://{book}{_SEPARATOR}{place}"


def write_book(book: Path, moved: Mapping[str, str]) -> None:
    """Write where servers are now, in one step; both are host:port. Those that have not moved need no line."""
    made = book.with_name(f".{book.name}.new")
    made.write_text("".join(f"{place} {address}\n" for place, address in moved.items()))
    os.replace(made, book)


def present_address(endpoint: str) -> str:
    """The tcp address that an endpoint of a book stands for at the moment."""
    book, _, place = endpoint.removeprefix(f"{SCHEME}://").rpartition(_SEPARATOR)
    try:
        lines = Path(book).read_text().splitlines()
    except FileNotFoundError:
        lines = []
    moved = dict(line.split(" ", 1) for line in lines if " " in line)
    return f"tcp://{moved.get(place, place)}"


def without_book(endpoint: str) -> str:
    """An address as users know it: that of a book by its name, any other as it is."""
    return f"tcp://{endpoint.rpartition(_SEPARATOR)[2]}" if endpoint.startswith(f"{SCHEME}://") else endpoint


class _BookChannel(SocketChannel):
    """Looks up the address at every connect."""

    def __init__(self, endpoint: str, keys: KeyFolder | None, role: Role) -> None:
        self._in_book = endpoint
        super().__init__(present_address(endpoint), keys, role)

    def reconnect(self) -> None:
        self._endpoint = present_address(self._in_book)
        super().reconnect()


class BookTransport:
    """The transport of endpoints that a book has."""

    def listen(self, endpoint: str, keys: KeyFolder | None, insecure: bool) -> Listener:
        """As Transport.listen."""
        return Listener(present_address(endpoint), keys, insecure)

    def connect(self, endpoint: str, keys: KeyFolder | None, role: Role) -> SocketChannel:
        """As Transport.connect."""
        return _BookChannel(endpoint, keys, role)
