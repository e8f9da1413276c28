"""Transports by address: the scheme before `://` selects one. To add a transport, add a file, and a line here.

A cluster may restart a server on another machine. The server keeps its first host:port as its name. The launcher writes
the current address to the address book, a file on the machine of every process of the job. Clients read the book
whenever they connect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torchfleet.base.errors import FleetError
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.replica_channels import SEPARATOR, ReplicaChannels
from torchfleet.ps.net.sockets import Listener, SocketChannel, ZeroMQ
from torchfleet.ps.net.transport import Channel, ServerSocket, Transport
from torchfleet.ps.net.wire import Role

SCHEME = "book"
_SEPARATOR = "#"  # between the path of the file and the server's name


def endpoint_in(book: str, place: str) -> str:
    """The endpoint of the server named `place`, whose current address is in the file `book`."""
    return f"{SCHEME}://{book}{_SEPARATOR}{place}"


def write_book(book: Path, moved: Mapping[str, str]) -> None:
    """Replace the book atomically. `moved`: current host:port by name; servers that have not moved may be left out."""
    made = book.with_name(f".{book.name}.new")
    made.write_text("".join(f"{place} {address}\n" for place, address in moved.items()))
    os.replace(made, book)


def present_address(endpoint: str) -> str:
    """The current tcp address of an endpoint in a book."""
    book, _, place = endpoint.removeprefix(f"{SCHEME}://").rpartition(_SEPARATOR)
    try:
        lines = Path(book).read_text().splitlines()
    except FileNotFoundError:
        lines = []
    moved = dict(line.split(" ", 1) for line in lines if " " in line)
    return f"tcp://{moved.get(place, place)}"


def without_book(endpoint: str) -> str:
    """An address as users know it: the server's name for an endpoint in a book, any other address unchanged."""
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
    """The transport of endpoints in an address book."""

    def listen(self, endpoint: str, keys: KeyFolder | None, insecure: bool) -> Listener:
        """As Transport.listen."""
        return Listener(present_address(endpoint), keys, insecure)

    def connect(self, endpoint: str, keys: KeyFolder | None, role: Role) -> SocketChannel:
        """As Transport.connect."""
        return _BookChannel(endpoint, keys, role)


TRANSPORTS: dict[str, Transport] = {
    "tcp": ZeroMQ(),
    "ipc": ZeroMQ(),
    SCHEME: BookTransport(),
}


def listen(endpoint: str, keys: KeyFolder | None = None, insecure: bool = False) -> ServerSocket:
    """Listen at an address. Raises the errors of Transport.listen."""
    transport = _transport(endpoint)
    if transport is None:
        raise FleetError(f"cannot listen on {endpoint}: expected an address that begins with {_known()}")
    return transport.listen(endpoint, keys, insecure)


def connect(endpoint: str, keys: KeyFolder | None = None, role: Role = Role.WORKER, shard: int = 0) -> Channel:
    """A client's channel to the server at an address. Raises the errors of Transport.connect.

    For a server with replicas, `endpoint` has the addresses of all, separated by SEPARATOR, and `shard` is the server's
    number.
    """
    if SEPARATOR in endpoint:
        return ReplicaChannels([connect(place, keys, role) for place in endpoint.split(SEPARATOR)], shard, role)
    transport = _transport(endpoint)
    if transport is None:
        raise FleetError(
            f"not an address to connect to: {endpoint!r} (it does not begin with {_known()}); expected tcp://host:port"
        )
    return transport.connect(endpoint, keys, role)


def shown(endpoint: str) -> str:
    """The address of a server, or of its replicas, in a text for users."""
    return SEPARATOR.join(map(without_book, endpoint.split(SEPARATOR)))


def _transport(endpoint: str) -> Transport | None:
    scheme, separator, _ = endpoint.partition("://")
    return TRANSPORTS.get(scheme) if separator else None


def _known() -> str:
    return " or ".join(f"{scheme}://" for scheme in TRANSPORTS if scheme != SCHEME)
