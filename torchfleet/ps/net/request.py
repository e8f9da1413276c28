"""A request on its way through the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.wire import Frame, Message


@dataclass(slots=True)
class Request:
    """A message, and where its reply goes."""

    message: Message
    peer: Peer
    arrived: float = 0.0
    role: int = 0  # proved by the client's key; without keys, as the message says
    hold: object = None  # charges the client's budget while the request waits
    frames: Sequence[Frame] = ()  # as received
    taken: int = (
        0  # of a traced request, in nanoseconds since 1970: when the server received it; `computed`: when it had run it
    )
    computed: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(array.data.nbytes for array in self.message.arrays)
