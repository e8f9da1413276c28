"""The other end of a link that is measured, `fleet doctor --serve`: answers with times, facts and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from torchfleet.base.errors import WireError
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.wire import (
    OK,
    Array,
    Command,
    Frame,
    Message,
    Reply,
    Role,
    decode,
    encode_reply,
    pack,
)
from torchfleet.ps.server.refusals import Refusals
from torchfleet.ps.server.state.counters import Counters

MAX_BYTES = 4 << 20  # of one reply

Replies = list[tuple[Peer, list[Frame]]]


class LinkServer:
    """A Handler of a transport. PING: times. STATS: facts. PUSH: bytes are taken. PULL: as many bytes as asked for."""

    def __init__(self, facts: Callable[[], object], incarnation: int) -> None:
        self._facts, self.incarnation, self.term = facts, incarnation, 0
        self.refusals = Refusals(self, Counters())
        self._bytes = np.random.default_rng(0).integers(0, 256, MAX_BYTES, np.uint8)  # random: no link compresses them
        self.num_requests = 0

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> Replies:
        """As Handler.handle."""
        taken = time.time_ns()
        self.num_requests += 1
        try:
            message = decode(frames)
            arrays = self._answer(message)
        except WireError as error:
            return [(peer, self.refusals.of_request(frames, error))]
        reply = Reply(message.command, OK, message.worker, self.incarnation, message.call, arrays)
        reply.taken, reply.answered = taken, time.time_ns()
        return [(peer, encode_reply(reply))]

    def _answer(self, message: Message) -> list[Array]:
        if message.command in (Command.PING, Command.PUSH):
            return []
        if message.command == Command.STATS:
            return [pack(self._facts())]
        if message.command == Command.PULL and message.arrays and message.arrays[0].data.dtype == np.uint64:
            wanted = message.arrays[0].data.reshape(-1)
            if len(wanted) == 1 and int(wanted[0]) <= MAX_BYTES:
                return [Array(0, self._bytes[: int(wanted[0])])]
        raise WireError(f"a doctor's server knows PING, STATS, PUSH, and PULL of up to {MAX_BYTES:,} bytes")

    def ready(self) -> Replies:
        """As Handler.ready."""
        return []

    def tick(self, now: float) -> Replies:
        """As Handler.tick."""
        return []

    def work(self) -> bool | None:
        """As Handler.work."""
        return None

    def rest(self) -> bool:
        """As Handler.rest."""
        return False

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes."""
        return ()
