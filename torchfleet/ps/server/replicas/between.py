"""Messages between the two replicas of a server.

FOLLOW    a replica asks the primary for its state; body: FollowBody. There is no reply; the primary sends APPEND
APPEND    the primary sends an entry, or a piece of its state. Without either, the message is a sign of life
CONFIRM   the reply to APPEND: the backup has all messages up to this number. It arrives over the primary's own channel,
          so it does not queue behind the workers' requests
LOST      the launcher reports that the other replica's process has ended; body: LostBody
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from torchfleet.base.errors import WireError
from torchfleet.ps.coordination.view import MAX_NAME
from torchfleet.ps.net.wire import (
    HEADER,
    MAGIC,
    MAX_BODY,
    VERSION,
    Command,
    Frame,
    Message,
    Role,
    encode,
    encode_bytes,
    pack,
    unpack,
)

IN_VIEW = 1  # flag of APPEND: the view names the receiver as backup
STUCK = 1  # flag of CONFIRM: the log of the backup cannot be written now
_OF_REPLICAS = frozenset((Command.FOLLOW, Command.APPEND, Command.LOST))  # commands that clients do not send
_GLANCE = struct.Struct("<5xB54xI")  # command and term in a header
_MICROSECONDS = 1e6
# As plain numbers: these messages are made and read for every push, and enumerations take longer.
_APPEND, _CONFIRM, _SERVER = int(Command.APPEND), int(Command.CONFIRM), int(Role.SERVER)
_CONFIRMS = MAGIC, VERSION, _CONFIRM, _SERVER  # the first fields of the header


@dataclass(frozen=True)
class Identity:
    """Identifies a process that is a replica of a server."""

    shard: int
    replica: int
    restart: int  # how often the launcher has restarted the replica
    incarnation: int

    @property
    def name(self) -> str:
        """The name of this process in views."""
        return f"{self.replica}.{self.restart}.{self.incarnation:x}"


class FollowBody(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class LostBody(msgspec.Struct, forbid_unknown_fields=True):
    replica: int
    restart: int

    def is_about(self, name: str) -> bool:
        return name.startswith(f"{self.replica}.{self.restart}.")


def is_of_replicas(command: int) -> bool:
    """Whether the command is for a replica itself, and not for the server behind it."""
    return command in _OF_REPLICAS


def is_for_primary(frames: Sequence[Frame], term: int) -> bool:
    """Whether a primary of this term may hand a message to its server, which checks all of it: a client's request, of
    no later term."""
    if not frames or len(frames[0]) < HEADER.size:
        return False
    command, seen = _GLANCE.unpack_from(frames[0])
    return command not in _OF_REPLICAS and seen <= term


def lost_process(message: Message) -> LostBody:
    """The body of a LOST. Raises WireError."""
    if len(message.arrays) != 1:
        raise WireError(f"LOST has one array, found {len(message.arrays)}")
    return unpack(message.arrays[0], LostBody, MAX_BODY)


def replica_of(name: str) -> int:
    """The number of the replica in a name of a view; -1 if the name has no number, such as ENDED."""
    number = name.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() else -1


def follow(own: Identity, term: int) -> list[Frame]:
    body, session = [pack(FollowBody(own.name))], own.incarnation
    return encode(Message(Command.FOLLOW, _SERVER, 0, own.replica, session, 0, 0, 0, body, session, own.shard, term))


def append(
    own: Identity, term: int, session: int, number: int, now: float, entry: Sequence[Frame], flags: int = 0
) -> list[Frame]:
    """`session`: the backup's incarnation; any other process ignores the message. `number`: 0 for a sign of life."""
    return encode_bytes(
        Message(
            _APPEND, _SERVER, flags, own.replica, session, number, stamp(now), 0, (), own.incarnation, own.shard, term
        ),
        entry,
    )


def confirm(own: Identity, term: int, number: int, stamped: int, flags: int = 0) -> list[Frame]:
    session = own.incarnation
    return encode(
        Message(_CONFIRM, _SERVER, flags, own.replica, session, number, stamped, 0, (), session, own.shard, term)
    )


def confirm_in(frames: Sequence[Frame], shard: int) -> Message | None:
    """The CONFIRM of this shard in `frames`; None for anything else: another process at the address may have sent
    it."""
    if len(frames) != 1 or len(frames[0]) != HEADER.size:
        return None  # not decoded: a confirmation comes for every push, and has no arrays
    fields = HEADER.unpack_from(frames[0])
    _, _, _, _, flags, worker, num_arrays, trace, client, call, sequence, floor, incarnation, found, term = fields
    if fields[:4] != _CONFIRMS or found != shard or num_arrays:
        return None
    return Message(_CONFIRM, _SERVER, flags, worker, client, call, sequence, floor, (), incarnation, found, term, trace)


def stamp(now: float) -> int:
    """The sender's time in microseconds, at least 1. The CONFIRM for the message returns it."""
    return max(1, int(now * _MICROSECONDS))


def seconds(stamped: int) -> float:
    return stamped / _MICROSECONDS
