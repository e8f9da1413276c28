"""A span is an interval of time in a traced step. This module also derives the ids of spans for OpenTelemetry.

A request carries 16 bits, the number of the traced step. Longer ids are derived from values that worker and server both
know: the numbers of the worker's process, of its client and of the call. So requests need not carry them.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec

MAX_TRACE = (1 << 16) - 1  # numbers of traced steps; they wrap around
_WORDS = (1 << 64) - 1

# Kinds of spans
STEP = "step"
PHASE = "phase"  # a part of a step, in the thread that trains
REQUEST = "request"  # from sending a request until its reply arrives
WAIT = "wait"  # a thread only waits for a reply
QUEUE = "queue"  # gradients wait for the sending thread
HANDLE = "handle"  # a server computes
HELD = "held"  # a server holds a request and replies later: it waits for other workers, or works in slices

Value = str | int | float


class Span(msgspec.Struct):
    """A span. Times are nanoseconds since 1970, by the clock of the process that recorded it."""

    name: str
    kind: str
    start: int
    end: int
    track: str  # the display row: spans of one track follow each other or are nested
    trace: int  # number of the traced step
    origin: int  # number of the worker's process that made the step
    client: int = 0  # of a request, like `call`: both sides know them
    call: int = 0
    more: dict[str, Value] = {}


def trace_id(origin: int, trace: int) -> int:
    """The 128-bit trace id, equal on worker and servers."""
    return _hash(b"trace", 16, origin, trace)


def step_id(origin: int, trace: int) -> int:
    """The id of the step's span, the parent of all other spans of its worker."""
    return _hash(b"step", 8, origin, trace)


def request_id(client: int, call: int) -> int:
    """The id of a request's span, the parent of the server's spans for it."""
    return _hash(b"request", 8, client, call)


def _hash(what: bytes, size: int, *numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *(number & _WORDS for number in numbers))
    return int.from_bytes(blake2b(packed, digest_size=size, person=what).digest(), "big") or 1  # 0 is not a valid id
