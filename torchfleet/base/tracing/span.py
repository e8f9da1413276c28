"""A span: something that took time in a traced step; and the numbers by which OpenTelemetry knows spans.

A request carries 16 bits, the number of the step. All longer numbers are made from what worker and server both know:
the number of the worker's process, of its client and of the call. So no identity has to travel.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec

MAX_TRACE = (1 << 16) - 1  # numbers of traced steps; after the last one they begin again
_WORDS = (1 << 64) - 1

# Kinds of spans
STEP = "step"
PHASE = "phase"  # a part of a step, in the thread that trains
REQUEST = "request"  # from when a request is sent until its reply is there
WAIT = "wait"  # a thread does nothing but wait for a reply
QUEUE = "queue"  # gradients wait for the thread that sends them
HANDLE = "handle"  # a server computes
HELD = "held"  # a server has a request, and answers it later: other workers are waited for, or it is done in slices

Value = str | int | float


class Span(msgspec.Struct):
    """Times are nanoseconds since 1970, by the clock of the process that made it."""

    name: str
    kind: str
    start: int
    end: int
    track: str  # what it is shown beside: spans of one track follow one another, or lie within one another
    trace: int  # number of the traced step
    origin: int  # number of the worker's process whose step it is
    client: int = 0  # of a request, as is `call`: both sides know them
    call: int = 0
    more: dict[str, Value] = {}


def trace_id(origin: int, trace: int) -> int:
    """128 bits, equal on worker and servers."""
    return _hash(b"trace", 16, origin, trace)


def step_id(origin: int, trace: int) -> int:
    """Of the span of the step: the parent of all others of its worker."""
    return _hash(b"step", 8, origin, trace)


def request_id(client: int, call: int) -> int:
    """Of the span of a request: the parent of what a server does for it."""
    return _hash(b"request", 8, client, call)


def _hash(what: bytes, size: int, *numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *(number & _WORDS for number in numbers))
    return int.from_bytes(blake2b(packed, digest_size=size, person=what).digest(), "big") or 1  # 0 is no identity
