"""A request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass

from torchfleet.net.transport import Peer
from torchfleet.net.wire import Message


@dataclass(slots=True)
class Request:
    """A message, and where its reply goes."""

    message: Message
    peer: Peer
    arrived: float = 0.0
