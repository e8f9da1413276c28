"""Requests, replies and their frames. docs/protocol.md describes every byte.

A message (a request or a reply) is a header frame and one frame per array, or one frame for all arrays if they are many
and small: the cost of a small frame does not depend on its size. The header holds the count, width and dtype of every
array. Decoding refuses a frame whose length differs from the header, before it makes anything of the frame. It
allocates nothing whose size depends on a number in the message.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

from torchfleet.base.errors import WireError
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.net.joined_arrays import BYTES, CODES, DTYPES, ENTRY, Array, JoinedArrays

__all__ = ["Array"]  # part of every message

MAGIC = b"TFLT"
VERSION = 2
MAX_ARRAYS = 4096
MAX_ENTRY = MAX_ARRAYS + 2  # arrays of a message between servers, which may contain a whole client message
MAX_FRAME = 1 << 30
MAX_BODY = 1 << 16  # bytes of a structured body
FEW_ARRAYS = 8  # a message with more arrays sends them in one frame if they are small
MAX_JOINED = 1 << 20  # bytes of such a frame
HEADER = struct.Struct("<4sBBBBIHHQQQQQII")
_FIRST_HEADER = struct.Struct("<4sBBBBIHxxQQQQ")  # the same in every version
_START = struct.Struct("<4sB")  # magic bytes and version
_ARRAY = struct.Struct("<IBxxxIQ")

Frame = Any  # bytes, memoryview, zmq.Frame's buffer or a numpy array: anything with the buffer protocol
Body = TypeVar("Body")

if sys.byteorder != "little":
    raise ImportError("torchfleet's frames are little-endian, and so must the machine be")


class Command(IntEnum):
    PING = 1
    STATS = 2
    CREATE_TABLE = 3
    PULL = 4
    PUSH = 5
    SET = 6
    ERASE = 7
    BARRIER = 8
    LEAVE = 9
    STOP = 10
    PULL_CHANGED = 11
    GATHER = 12
    SEND = 13
    TAKE = 14
    FILES = 15
    SAVE = 16
    CLOCK = 17
    SHRINK = 18
    INSPECT = 19
    JOIN = 20
    WALK = 21
    FOLLOW = 22
    APPEND = 23
    CONFIRM = 24
    LOST = 25
    TABLES = 26
    SUBSCRIBE = 27
    FORWARD = 28  # of heter workers, like BACKWARD
    BACKWARD = 29
    EXCHANGE = 30
    ENTER = 31
    STARTING = 32


class Role(IntEnum):
    """The role of a sender. With keys, the key decides the role, not the message."""

    WORKER = 1
    FIRST_WORKER = 2
    LAUNCHER = 3
    SERVER = 4  # another replica of the same shard


OK, ERROR = 0, 1  # the status of a reply
NO_CREATE = 1  # flag of PULL: missing keys read as zeros and take no row
VERSIONS = 2  # flag of PULL, and of PUSH with DENSE_BACK: the reply ends with the step (number of updates) of each of
# its tables
SYNC = 4  # flag of PUSH: update once with the mean of all workers' gradients, and reply after the update; of PULL: the
# pull is part of such a step, and new keys get their rows at its end
DENSE_BACK = 8  # flag of PUSH: the reply holds the dense sections' new values
DELTA = 16  # flag of PUSH: differences to be added, instead of gradients
FORESEEN = 16  # flag of PULL: these keys may not be looked up after all: a missing key reads its first value and takes
# no row, except where pulls count appearances; with NO_CREATE also there
GATHERED = 32  # flag of PUSH: update once with the mean of a given number of pushes of any workers; reply at once
BOUNDED = 64  # flag of PUSH: wait while the push would raise another worker's staleness above the limit; of PULL: this
# worker computes with these dense values, and pushes next
STATE = 128  # flag of PULL and WALK: rows come with the state of their rule; of SET: the request ends with the step of
# each of its tables. With NO_CREATE, a SET has the state alone, of rows that exist; their values stay
WRITTEN = 128  # flag of PUSH: values that a script has written into dense parameters, NaN where it has written nothing;
# with DELTA: differences. It counts as no update


@dataclass(slots=True)
class Message:
    """A request."""

    command: int
    role: int = Role.WORKER
    flags: int = 0
    worker: int = 0
    client: int = 0  # a random number per client
    call: int = 0  # numbers a client's requests, so that replies can be matched
    sequence: int = 0  # numbers a client's changes per server from 1 on; 0: a request that may be repeated freely
    floor: int = 0  # all changes of this client below this sequence number are settled
    arrays: Sequence[Array] = field(default_factory=list)
    incarnation: int = 0  # a random number per process: distinguishes a worker from its previous process
    shard: int = 0  # the number of the server, if servers have replicas; else 0
    term: int = 0  # the shard's highest term that the sender has seen; 0: no replicas, or no term seen yet
    trace: int = 0  # the number of the traced step that the request belongs to, below 2**16; 0: not traced


@dataclass(slots=True)
class Reply:
    """The answer to a request. It has the same header, with the status in place of the role.

    It repeats command, worker and call of its request.
    """

    command: int
    status: int  # OK or ERROR
    worker: int
    incarnation: int  # a random number per server process
    call: int
    arrays: Sequence[Array] = field(default_factory=list)
    term: int = 0  # the server's term; 0: it has no replicas
    taken: int = 0  # of a traced request: when the server received it, in nanoseconds since 1970 by its clock; else 0
    answered: int = 0  # of a traced request: when the server answered it, by the same clock; else 0


def encode_reply(reply: Reply) -> list[Frame]:
    """As `encode`."""
    message = Message(reply.command, reply.status, 0, reply.worker, call=reply.call, arrays=reply.arrays)
    message.incarnation, message.term = reply.incarnation, reply.term
    message.sequence, message.floor = reply.taken, reply.answered
    return encode(message)


def decode_reply(frames: Sequence[Frame]) -> Reply:
    """As `decode`."""
    message = decode(frames)
    return Reply(
        message.command, message.role, message.worker, message.incarnation, message.call, message.arrays, message.term,
        message.sequence, message.floor,
    )  # fmt: skip


# Fields of a message's header before the number of its arrays, and behind it
_SENDER = attrgetter("command", "role", "flags", "worker")
_REQUEST = attrgetter("trace", "client", "call", "sequence", "floor", "incarnation", "shard", "term")


def encode(message: Message) -> list[Frame]:
    """Frames of a message. Contiguous arrays are not copied: do not change them until the message has been sent."""
    num_arrays = len(message.arrays)
    if num_arrays > MAX_ARRAYS and num_arrays > _most_arrays(message.role):
        raise WireError(f"{num_arrays} arrays in one message, at most {_most_arrays(message.role)}")
    header = HEADER.pack(MAGIC, VERSION, *_SENDER(message), num_arrays, *_REQUEST(message))
    if isinstance(message.arrays, JoinedArrays):
        return [header + message.arrays.entries.tobytes(), message.arrays.words]
    parts = [header]
    frames: list[Frame] = [b""]
    num_bytes = 0
    for array in message.arrays:
        data = array.data if array.data.ndim == 2 else array.data.reshape(-1, 1)
        if not data.flags.c_contiguous:
            data = np.ascontiguousarray(data)
        if data.nbytes > MAX_FRAME:
            raise WireError(
                f"an array of {data.nbytes:,} bytes is too large for one message (at most {MAX_FRAME:,}). "
                "Send it in ranges, or use more servers."
            )
        parts.append(_ARRAY.pack(array.number, CODES[data.dtype], data.shape[1], data.shape[0]))
        frames.append(data)
        num_bytes += data.nbytes
    frames[0] = b"".join(parts)
    return _joined(frames) if num_arrays > FEW_ARRAYS and num_bytes <= MAX_JOINED else frames


def encode_bytes(message: Message, frames: Sequence[Frame]) -> list[Frame]:
    """As `encode`, for a message whose arrays are the bytes of `frames`. The result has the frames themselves, unless
    they are many and small: a transport sends a frame that it has received without touching its content."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    if len(sizes) <= FEW_ARRAYS and (
        not sizes or max(sizes) <= MAX_FRAME
    ):  # most messages: no array is made of a frame
        header = HEADER.pack(MAGIC, VERSION, *_SENDER(message), len(sizes), *_REQUEST(message))
        return [header + b"".join([_ARRAY.pack(0, BYTES, 1, size) for size in sizes]), *frames]
    message.arrays = [Array(0, np.frombuffer(frame, np.uint8)) for frame in frames]
    made = encode(message)
    return [made[0], *frames] if len(made) == len(frames) + 1 else made


def _joined(frames: Sequence[Frame]) -> list[Frame]:
    """The header, and all arrays in one frame, each filled up to a multiple of 8 bytes."""
    parts = []
    for data in frames[1:]:
        parts.append(data)
        if data.nbytes % 8:
            parts.append(bytes(-data.nbytes % 8))
    return [frames[0], b"".join(parts)]


def call_of(frames: Sequence[Frame]) -> int:
    """The call number of a request, even if the rest is malformed, so that an error can be sent back; 0 if unknown."""
    return int(_FIRST_HEADER.unpack_from(frames[0])[8]) if version_of(frames) else 0


def version_of(frames: Sequence[Frame]) -> int:
    """The protocol version of a message, even if the rest is malformed; 0 if it is not a torchfleet message.

    The first 48 bytes are the same in all versions.
    """
    if not frames or memoryview(frames[0]).nbytes < _FIRST_HEADER.size:
        return 0
    magic, version = _START.unpack_from(frames[0])
    return int(version) if magic == MAGIC else 0


def decode(frames: Sequence[Frame]) -> Message:
    """Decode a message. Its arrays share the frames' memory where they can. Raises WireError and nothing else."""
    if not frames:
        raise WireError("expected a header frame, found no frame at all")
    header = frames[0]
    size = memoryview(header).nbytes
    if size < _FIRST_HEADER.size:
        raise WireError(f"expected a header of at least {_FIRST_HEADER.size} bytes, found {size}")
    magic, version = _START.unpack_from(header)
    if magic != MAGIC:
        raise WireError(f"expected the magic bytes {MAGIC!r}, found {magic!r}: this is not a torchfleet client")
    if version != VERSION:
        raise WireError(f"expected protocol version {VERSION}, found {version}: use the same torchfleet on both sides")
    if size < HEADER.size:
        raise WireError(f"expected a header of at least {HEADER.size} bytes, found {size}")
    (
        _, _, command, role, flags, worker, num_arrays, trace, client, call, sequence, floor, incarnation, shard, term
    ) = HEADER.unpack_from(header)  # fmt: skip
    has_room = num_arrays <= MAX_ARRAYS or num_arrays <= _most_arrays(role)
    if not has_room or size != HEADER.size + num_arrays * _ARRAY.size:
        raise WireError(f"a header for {num_arrays} arrays cannot have {size} bytes")
    is_joined = len(frames) == 2 and num_arrays > FEW_ARRAYS
    if len(frames) != 1 + num_arrays and not is_joined:
        raise WireError(f"the header announces {num_arrays} arrays, found {len(frames) - 1}")
    arrays = _split_arrays(header, num_arrays, frames[1]) if is_joined else _decode_arrays(header, frames)
    return Message(command, role, flags, worker, client, call, sequence, floor, arrays, incarnation, shard, term, trace)


def _most_arrays(role: int) -> int:
    return MAX_ENTRY if role == Role.SERVER else MAX_ARRAYS


def _decode_arrays(header: Frame, frames: Sequence[Frame]) -> Sequence[Array]:
    """The arrays behind the header, one per frame."""
    arrays = []
    for index in range(len(frames) - 1):
        number, code, num_columns, num_rows = _ARRAY.unpack_from(header, HEADER.size + index * _ARRAY.size)
        dtype, frame = DTYPES.get(code), frames[1 + index]
        if dtype is None:
            raise WireError(f"array {index} has the unknown dtype code {code}; known are {sorted(DTYPES)}")
        size, expected = memoryview(frame).nbytes, num_rows * num_columns * dtype.itemsize
        if size != expected:
            raise WireError(
                f"array {index} is announced as {num_rows} x {num_columns} {dtype}, which is {expected} bytes; its "
                f"frame has {size}"
            )
        if num_rows > MAX_FRAME:  # only possible when a row is empty
            raise WireError(f"array {index} is announced with {num_rows} rows of no bytes")
        values = np.frombuffer(frame, dtype) if size else np.empty(0, dtype)
        if not values.flags.aligned:  # small frames may be unaligned in the receive buffer; kernels need alignment
            values = values.copy()
        arrays.append(Array(number, values.reshape(num_rows, num_columns)))
    return arrays


def _split_arrays(header: Frame, num_arrays: int, frame: Frame) -> JoinedArrays:
    """The arrays behind the header that share one frame."""
    size = memoryview(frame).nbytes
    if size > MAX_JOINED + 8 * MAX_ENTRY or size % 8:
        raise WireError(f"{num_arrays} arrays in one frame of {size} bytes: expected a multiple of 8, in at most 1 MiB")
    words = np.frombuffer(frame, np.uint64) if size else np.empty(0, np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    arrays = JoinedArrays.split(np.frombuffer(header, ENTRY, num_arrays, HEADER.size), words)
    if arrays is None:
        raise WireError(_wrong_entries(header, size))
    return arrays


def _wrong_entries(header: Frame, size: int) -> str:
    """What is wrong with the first array that does not fit a shared frame of `size` bytes."""
    start = 0
    for index, (_, code, num_columns, num_rows) in enumerate(_ARRAY.iter_unpack(memoryview(header)[HEADER.size :])):
        dtype = DTYPES.get(code)
        if dtype is None:
            return f"array {index} has the unknown dtype code {code}; known are {sorted(DTYPES)}"
        num_bytes = num_rows * num_columns * dtype.itemsize
        if num_bytes > size - start or num_rows > MAX_FRAME:
            return (
                f"array {index} is announced as {num_rows} x {num_columns} {dtype}, which is {num_bytes} bytes; its "
                f"frame has {size - start} more"
            )
        start += num_bytes + -num_bytes % 8
    return f"the header announces {start} bytes of arrays, their frame has {size}"


def pack(body: object) -> Array:
    """A structured body (a table's description, statistics, an error) as an array frame of bytes."""
    return Array(0, np.frombuffer(msgspec.msgpack.encode(body), np.uint8).reshape(-1, 1))


def unpack(array: Array, expected: type[Body], max_bytes: int = MAX_FRAME) -> Body:
    """The body, checked field by field against its type. Raises WireError."""
    if array.data.dtype != np.uint8:
        raise WireError(f"expected a body of bytes, found an array of {array.data.dtype}")
    if array.data.nbytes > max_bytes:
        raise WireError(f"expected a body of at most {max_bytes:,} bytes, found {array.data.nbytes:,}")
    try:
        return msgspec.msgpack.decode(array.data.tobytes(), type=prepared(expected))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"expected a {expected.__name__}: {error}") from None


def error_arrays(kind: str, text: str) -> list[Array]:
    """The arrays of a reply whose status is ERROR."""
    return [pack({"kind": kind, "text": text})]
