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
    role: int = 0  # by its key, or as it says where there are no keys
    hold: object = None  # what the server's memory of it is counted by, while it waits
    frames: Sequence[Frame] = ()  # as they came
    taken: int = (
        0  # of one that is traced: when the server took it, and when it had computed, in nanoseconds since 1970
    )
    computed: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(array.data.nbytes for array in self.message.arrays)
