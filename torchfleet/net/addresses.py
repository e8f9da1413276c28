"""Which transport serves which addresses, by the scheme before `://`. A new transport is a file, and a line here."""

from __future__ import annotations

from torchfleet.errors import FleetError
from torchfleet.net.address_book import SCHEME, BookTransport, without_book
from torchfleet.net.keys import KeyFolder
from torchfleet.net.replica_channels import SEPARATOR, ReplicaChannels
from torchfleet.net.sockets import ZeroMQ
from torchfleet.net.transport import Channel, ServerSocket, Transport
from torchfleet.net.wire import Role

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
    return " or ".join(f"{scheme}://" for scheme in TRANSPORTS)
