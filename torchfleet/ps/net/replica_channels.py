"""A client's channel to a server with replicas. It leads to the replica that is primary.

A replica that is not primary refuses every request (NotPrimary). After a refusal, or SILENCE seconds without a message,
the channel asks all replicas (PING). The replica that answers with the highest term is the primary. The client must
then send its unanswered requests again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchfleet.base.errors import NotPrimary, WireError
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import (
    ERROR,
    HEADER,
    MAGIC,
    VERSION,
    Command,
    Frame,
    Message,
    Role,
    decode_reply,
    encode,
    unpack,
)

SEPARATOR = "|"  # between the addresses of a server's replicas
SILENCE = 0.2  # seconds without a message after which all replicas are asked
_STEP = 0.02  # seconds between two polls of all replicas, once they were asked
_LEAST = 0.001  # shortest wait in seconds; a shorter one may be rounded to 0
_PROBE = (1 << 64) - 1  # the call number of our PINGs; no client's request has it


class Envelope(NamedTuple):
    """Fields of a message's header, for code that forwards the message. The rest of the message is unchecked."""

    command: int
    role: int  # of a reply: its status
    worker: int
    call: int
    shard: int
    term: int


def envelope_of(frames: Sequence[Frame]) -> Envelope | None:
    """The envelope of a message of this protocol version, whose rest may be malformed; None for anything else."""
    if not frames or memoryview(frames[0]).nbytes < HEADER.size:
        return None
    fields = HEADER.unpack_from(frames[0])
    if fields[0] != MAGIC or fields[1] != VERSION:
        return None
    return Envelope(fields[2], fields[3], fields[5], fields[9], fields[13], fields[14])


class ReplicaChannels:
    """As Channel. `shard`: the number of the server; `term`: the highest term of its answers so far."""

    def __init__(self, channels: Sequence[Channel], shard: int, role: Role) -> None:
        self._channels, self.shard, self._role = channels, shard, role
        self.term = 0
        self._current = 0
        self._waited = 0.0  # seconds of waiting since the last message of the current replica
        self._is_asking = self._is_refused = self._has_moved = False

    def send(self, frames: Sequence[Frame]) -> bool:
        return self._channels[self._current].send(frames)

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        """As Channel.receive. Also returns None as soon as `take_move` would return True."""
        deadline = self.now() + timeout
        while True:
            before = self.now()
            longest = _STEP if self._is_asking else max(_LEAST, SILENCE - self._waited)
            frames = self._channels[self._current].receive(max(0.0, min(longest, deadline - before)))
            if frames is not None:
                self._waited = 0.0
                if self._is_for_client(self._current, frames):
                    return frames
            else:
                self._waited += self.now() - before
            if self._is_asking:
                self._hear_others()
            if self._waited >= SILENCE:
                self._ask()
            if self._has_moved or self.now() >= deadline:
                return None

    def take_move(self) -> bool:
        """Whether the channel has switched since the last call: to another replica, to the same replica after it
        refused requests and became primary again, or to a later process of this replica."""
        moved, self._has_moved = self._has_moved, False
        return moved

    def reconnect(self) -> None:
        self._channels[self._current].reconnect()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def now(self) -> float:
        return self._channels[0].now()

    def wakes(self) -> tuple[object, ...]:
        return tuple(thing for channel in self._channels for thing in channel.wakes())

    def _ask(self) -> None:
        self._waited, self._is_asking = 0.0, True
        probe = encode(Message(Command.PING, self._role, call=_PROBE, shard=self.shard, term=self.term))
        for channel in self._channels:
            channel.send(probe)

    def _hear_others(self) -> None:
        for number, channel in enumerate(self._channels):
            while number != self._current and (frames := channel.receive(0.0)) is not None:
                self._is_for_client(number, frames)  # only for the probe: late replies of a former primary are dropped

    def _is_for_client(self, number: int, frames: Sequence[Frame]) -> bool:
        """Whether the message is a reply for the client. Updates which replica is primary."""
        envelope = envelope_of(frames)
        if envelope is None:
            return number == self._current  # another protocol version: the client detects it by the first bytes
        if envelope.role == ERROR and _is_refusal(frames):
            if number == self._current and envelope.call != _PROBE and not self._is_refused:
                self._is_refused = True
                self._ask()
            return False
        return envelope.term >= self.term and self._follow(number, envelope)

    def _follow(self, number: int, envelope: Envelope) -> bool:
        """Handle a message of a primary. Returns whether it is a reply for the client."""
        is_newer = 0 < self.term < envelope.term  # another process of that replica may have been restored from its log
        is_news = number != self._current or self._is_refused or is_newer
        if envelope.call == _PROBE or number == self._current:
            self.term = envelope.term
            self._is_asking = False
        if envelope.call == _PROBE and is_news:
            self._current, self._is_refused, self._has_moved, self._waited = number, False, True, 0.0
        return envelope.call != _PROBE and number == self._current


def _is_refusal(frames: Sequence[Frame]) -> bool:
    try:
        reply = decode_reply(frames)
        return bool(reply.arrays) and unpack(reply.arrays[0], dict).get("kind") == NotPrimary.__name__
    except WireError:
        return False
