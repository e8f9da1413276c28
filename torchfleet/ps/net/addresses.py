"""Which transport serves which addresses, by the scheme before `://`. A new transport is a file, and a line here.

Servers may move: a cluster may start one again on another machine. It keeps the name host:port that it had at first.
Whoever started it writes where it is now into a file beside every process of the job, the address book. Clients look
into it whenever they connect anew.
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


TRANSPORTS: dict[str, Transport] = {
    "tcp": ZeroMQ(),
    "ipc": ZeroMQ(),
    SCHEME: BookTransport(),
}


def listen(endpoint: str, keys: KeyFolder | None = None, insecure: bool = False) -> ServerSocket:
    """A server's end at this address; Transport.listen has the errors."""
    transport = _transport(endpoint)
    if transport is None:
        raise FleetError(f"cannot listen on {endpoint}: expected an address that begins with {_known()}")
    return transport.listen(endpoint, keys, insecure)


def connect(endpoint: str, keys: KeyFolder | None = None, role: Role = Role.WORKER, shard: int = 0) -> Channel:
    """A client's way to the server at this address; Transport.connect has the errors.

    `shard`: the server's number, for one with replicas, whose addresses are separated by SEPARATOR.
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
