"""Entries: the changes of a server, in order. A server that applies all of them reaches the same state.

An entry is a list of frames. The first frame has the fixed fields, the peer and the effects. The others are the frames
of the request as they arrived, or those of a piece of the state.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec
import numpy as np

from torchfleet.base.errors import LogError
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.net.packed import PackedAnswer, PackedArray
from torchfleet.ps.net.wire import MAX_ARRAYS, Frame
from torchfleet.ps.tables.policies.decisions import Noted

_HEAD = struct.Struct("<BBHIQQQqdd")
_LENGTH = struct.Struct("<Q")
_COLUMN_TYPES = {"<u4": np.dtype("<u4"), "<f4": np.dtype("<f4")}


class Kind(IntEnum):
    REQUEST = 1  # a request that was applied
    REFUSED = 2  # a change that was refused: only its outcome is remembered
    TICK = 3  # passing time changed something
    SLICE = 4  # one slice of long work changed something
    PIECE = 5  # a piece of the state at this index; not a change
    TERM = 6  # reserved for a change of the server that makes the entries; no code writes it


class NotedTable(msgspec.Struct, array_like=True):
    """The decisions of one table (Noted in tables/policies/decisions.py), as bytes."""

    table: int
    dropped: bytes = b""
    gone: bytes = b""
    forgotten: bytes = b""
    let_in: bytes = b""
    left_out: bytes = b""
    saved: bytes = b""
    carried: dict[str, tuple[str, bytes]] = {}


class Refused(msgspec.Struct, array_like=True):
    """A change that was refused for good: its client and sequence number, and the error."""

    client: int
    sequence: int
    floor: int
    worker: int
    incarnation: int
    kind: str
    text: str


class LongResult(msgspec.Struct, array_like=True):
    """The result of a long request: arrays, or the kind and text of an error."""

    arrays: list[PackedArray] = []
    error: tuple[str, str] | None = None

    def packed(self) -> PackedAnswer:
        """The result in the form of net/packed.py."""
        return self.arrays if self.error is None else self.error


class Effects(msgspec.Struct, array_like=True):
    """The effects of a change that do not follow from its request: decisions, errors, and the progress of long work."""

    tables: list[NotedTable] = []
    num_errors: int = 0  # requests that this change answered with an error; a replay must find the same number
    refused: Refused | None = None
    token: int = 0  # names the long request that a slice belongs to; 0: none
    is_begun: bool = False  # this slice began a save
    result: LongResult | None = None  # of the last slice

    @property
    def is_empty(self) -> bool:
        return not (self.tables or self.num_errors or self.refused or self.token or self.is_begun or self.result)


@dataclass(slots=True)
class Entry:
    kind: int
    index: int = 0
    term: int = 0
    wall: int = 0  # the tables' time, seconds since 1970
    time: float = 0.0  # the server's own time, in seconds
    pause: float = 0.0  # of a TICK: seconds in which the server stood still
    role: int = 0
    peer: bytes = b""
    effects: Effects = field(default_factory=Effects)
    frames: Sequence[Frame] = ()


def encode_entry(entry: Entry) -> list[Frame]:
    """The frames of an entry. `entry.frames` are not copied: do not change them until all sinks have confirmed it."""
    effects = b"" if entry.effects.is_empty else msgspec.msgpack.encode(entry.effects)
    lengths = [memoryview(frame).nbytes for frame in entry.frames]
    head = _head(len(lengths)).pack(
        entry.kind, entry.role, len(lengths), len(entry.peer), len(effects), entry.index, entry.term,
        entry.wall, entry.time, entry.pause, *lengths,
    )  # fmt: skip
    return [head + entry.peer + effects, *entry.frames]


@functools.lru_cache(maxsize=1024)
def _head(num_frames: int) -> struct.Struct:
    return struct.Struct(f"{_HEAD.format}{num_frames}Q")


def size_of_frame(frame: Frame) -> int:
    """The size of a frame in bytes."""
    return memoryview(frame).nbytes


def lengths_in(head: memoryview) -> list[int]:
    """The lengths of the frames that follow the first frame, `head`. Raises LogError if `head` is malformed."""
    if len(head) < _HEAD.size:
        raise LogError(f"expected an entry of at least {_HEAD.size} bytes, found {len(head)}")
    num_frames = _HEAD.unpack_from(head)[2]
    if num_frames > MAX_ARRAYS + 1 or len(head) < _HEAD.size + _LENGTH.size * num_frames:
        raise LogError(f"an entry of {num_frames} frames cannot have a first frame of {len(head)} bytes")
    return [_LENGTH.unpack_from(head, _HEAD.size + _LENGTH.size * i)[0] for i in range(num_frames)]


def decode_entry(frames: Sequence[Frame]) -> Entry:
    """The inverse of encode_entry. The frames are not copied. Raises LogError, and no other error, if malformed."""
    if not frames:
        raise LogError("expected an entry, found no frame at all")
    head = memoryview(frames[0]).cast("B")
    lengths = lengths_in(head)
    kind, role, _, num_peer, num_effects, index, term, wall, time, pause = _HEAD.unpack_from(head)
    if lengths != [size_of_frame(frame) for frame in frames[1:]]:
        raise LogError(f"entry {index}: the frames are not those that its first one announces")
    start = _HEAD.size + _LENGTH.size * len(lengths)
    if kind not in tuple(Kind) or len(head) != start + num_peer + num_effects:
        raise LogError(f"entry {index}: kind {kind} with {num_peer} and {num_effects} bytes in {len(head)} is unknown")
    effects = Effects()
    if num_effects:
        try:
            effects = msgspec.msgpack.decode(head[start + num_peer :], type=prepared(Effects))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LogError(f"entry {index}: what was decided cannot be read: {error}") from None
    peer = bytes(head[start : start + num_peer])
    return Entry(kind, index, term, wall, time, pause, role, peer, effects, list(frames[1:]))


def noted_table(number: int, noted: Noted) -> NotedTable:
    """The decisions of table `number` as bytes, for an entry."""
    columns = {name: (column.dtype.str, column.tobytes()) for name, column in noted.carried.items()}
    return NotedTable(
        number, noted.dropped.tobytes(), noted.gone.tobytes(), noted.forgotten.tobytes(), noted.let_in.tobytes(),
        noted.left_out.tobytes(), noted.saved.tobytes(), columns,
    )  # fmt: skip


def noted_of(written: NotedTable) -> Noted:
    """The inverse of noted_table. Raises LogError if `written` is malformed."""
    try:
        columns = {name: np.frombuffer(data, _COLUMN_TYPES[dtype]) for name, (dtype, data) in written.carried.items()}
        found = Noted(carried=columns)
        for what in ("dropped", "gone", "forgotten", "let_in", "left_out", "saved"):
            setattr(found, what, np.frombuffer(getattr(written, what), np.uint64))
        return found
    except (ValueError, KeyError) as error:
        raise LogError(f"what table {written.table} decided cannot be read: {error}") from None
