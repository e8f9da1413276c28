"""Messages between the two replicas of a server.

FOLLOW    a replica asks the primary for its state; body: FollowBody. There is no reply; the primary sends APPEND
APPEND    the primary sends an entry, or a piece of its state. Without either, the message is a sign of life
CONFIRM   the reply to APPEND: the backup has all messages up to this number. It arrives over the primary's own channel,
          so it does not queue behind the workers' requests
LOST      the launcher reports that the other replica's process has ended; body: LostBody
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from torchfleet.base.errors import WireError
from torchfleet.ps.coordination.view import MAX_NAME
from torchfleet.ps.net.wire import (
    MAX_BODY,
    Command,
    Frame,
    Message,
    Role,
    decode,
    encode,
    encode_bytes,
    pack,
    unpack,
)

IN_VIEW = 1  # flag of APPEND: the view names the receiver as backup
STUCK = 1  # flag of CONFIRM: the log of the backup cannot be written now
REQUESTS = (Command.FOLLOW, Command.APPEND)
_MICROSECONDS = 1e6


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
    message = _message(own, Command.FOLLOW, term, own.incarnation)
    message.arrays = [pack(FollowBody(own.name))]
    return encode(message)


def append(
    own: Identity, term: int, session: int, number: int, now: float, entry: Sequence[Frame], flags: int = 0
) -> list[Frame]:
    """`session`: the backup's incarnation; any other process ignores the message. `number`: 0 for a sign of life."""
    message = _message(own, Command.APPEND, term, session)
    message.call, message.sequence, message.flags = number, stamp(now), flags
    return encode_bytes(message, entry)


def confirm(own: Identity, term: int, number: int, stamped: int, flags: int = 0) -> list[Frame]:
    message = _message(own, Command.CONFIRM, term, own.incarnation)
    message.call, message.sequence, message.flags = number, stamped, flags
    return encode(message)


def confirm_in(frames: Sequence[Frame], shard: int) -> Message | None:
    """The CONFIRM of this shard in `frames`; None for anything else: another process at the address may have sent
    it."""
    try:
        message = decode(frames)
    except WireError:
        return None
    is_confirm = (message.command, message.role, message.shard) == (Command.CONFIRM, Role.SERVER, shard)
    return message if is_confirm else None


def stamp(now: float) -> int:
    """The sender's time in microseconds, at least 1. The CONFIRM for the message returns it."""
    return max(1, int(now * _MICROSECONDS))


def seconds(stamped: int) -> float:
    return stamped / _MICROSECONDS


def _message(own: Identity, command: Command, term: int, session: int) -> Message:
    return Message(
        command,
        Role.SERVER,
        worker=own.replica,
        client=session,
        incarnation=own.incarnation,
        shard=own.shard,
        term=term,
    )
