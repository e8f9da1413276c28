"""What a message says on the outside, for whoever passes it on: nothing behind the header is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchfleet.net.wire import HEADER, VERSION, Frame, version_of


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields of a header."""

    command: int
    role: int  # of a reply: its status
    worker: int
    call: int
    shard: int
    term: int


def envelope_of(frames: Sequence[Frame]) -> Envelope | None:
    """The envelope of a message of this version, which may be broken in every other way; None if it is none."""
    if version_of(frames) != VERSION or memoryview(frames[0]).nbytes < HEADER.size:
        return None
    fields = HEADER.unpack_from(memoryview(frames[0]).cast("B"))
    return Envelope(fields[2], fields[3], fields[5], fields[8], fields[12], fields[13])
