"""The messages between a simulated process and the coordinator, over a socket pair: packets with raw frames."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Address = tuple[int, int]  # a process, and a mailbox in it

COORDINATOR = -1  # as a process: a request to the coordinator itself
STEPS = -2  # as a process: a report of a training step to the coordinator

_HEADER = struct.Struct("<iiiidIQ")
_TURN = struct.Struct("<BBxxIddi")  # kind, whether the main thread is stuck, packets, a time, busy seconds, a code
_ALIGN = 16
_JOIN = 1 << 16  # bytes: smaller messages are copied into one buffer
_MOST_PIECES = 512
_SILENCE = 1.0  # seconds

GRANT, YIELD, ENDED, DESCRIBE = 1, 2, 3, 4


class LineClosed(Exception):
    """The process at the other end is gone."""


@dataclass(slots=True)
class Packet:
    """Frames sent from one process to another, or to the coordinator."""

    to: Address
    sender: Address
    time: float  # the send time; on delivery, the arrival time
    sizes: tuple[int, ...]
    body: Any  # the frames in one buffer, each padded to a multiple of _ALIGN bytes

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def frames(self) -> list[memoryview]:
        """The frames of a received packet, as views of its buffer."""
        view, at, found = memoryview(self.body), 0, []
        for size in self.sizes:
            found.append(view[at : at + size])
            at += _padded(size)
        return found


@dataclass(slots=True)
class Turn:
    """A message on the line. GRANT: run until `time`. YIELD: nothing to do before `time`. ENDED: with this exit
    code. DESCRIBE: report what your threads wait for."""

    kind: int
    time: float = 0.0
    busy: float = 0.0
    code: int = 0
    is_stuck: bool = False
    packets: Sequence[Packet] = ()


def packet(to: Address, sender: Address, time: float, frames: Sequence[Any]) -> Packet:
    """Make a packet with copies of these frames: the caller may reuse their memory when this returns."""
    pieces: list[Any] = []
    sizes = []
    for frame in frames:
        view = memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(b"")
        sizes.append(view.nbytes)
        pieces += [view, bytes(-view.nbytes % _ALIGN)]
    return Packet(to, sender, time, tuple(sizes), b"".join(pieces))


class Line:
    """One end of the line between a simulated process and the coordinator. Blocks.

    `on_silence` is called after each second in which the other end sends nothing that is waited for, and takes nothing
    that is sent.
    """

    def __init__(self, connection: socket.socket, on_silence: Callable[[], None] | None = None) -> None:
        self._socket, self._on_silence = connection, on_silence
        connection.settimeout(None if on_silence is None else _SILENCE)

    def send(self, turn: Turn) -> None:
        """Send a turn. Raises LineClosed if the other end is closed."""
        pieces = [_TURN.pack(turn.kind, turn.is_stuck, len(turn.packets), turn.time, turn.busy, turn.code)]
        for sent in turn.packets:
            header = _HEADER.pack(*sent.to, *sent.sender, sent.time, len(sent.sizes), len(sent.body))
            pieces += [header + struct.pack(f"<{len(sent.sizes)}Q", *sent.sizes), sent.body]
        for group in _groups(pieces):
            self._send_all(group)

    def receive(self) -> Turn:
        """Return the next turn. Raises LineClosed if the other end is closed."""
        kind, is_stuck, num, time, busy, code = _TURN.unpack(self._take(_TURN.size))
        return Turn(kind, time, busy, code, bool(is_stuck), [self._packet() for _ in range(num)])

    def close(self) -> None:
        self._socket.close()

    def _packet(self) -> Packet:
        *ends, time, num_frames, num_bytes = _HEADER.unpack(self._take(_HEADER.size))
        sizes = struct.unpack(f"<{num_frames}Q", self._take(8 * num_frames))
        return Packet((ends[0], ends[1]), (ends[2], ends[3]), time, sizes, self._take(num_bytes))

    def _take(self, size: int) -> bytearray:
        taken = bytearray(size)
        view, at = memoryview(taken), 0
        while at < size:
            num = self._moved(self._socket.recv_into, view[at:])
            if not num:
                raise LineClosed
            at += num
        return taken

    def _send_all(self, pieces: Sequence[Any]) -> None:
        sent = self._moved(self._socket.sendmsg, pieces)
        for piece in pieces:
            rest = memoryview(piece)[sent:]
            sent = max(0, sent - len(piece))
            while rest:
                rest = rest[self._moved(self._socket.send, rest) :]

    def _moved(self, call: Callable[[Any], int], what: Any) -> int:
        """Return how many bytes a call of the socket has moved. It takes as long as the other end needs."""
        while True:
            try:
                return call(what)
            except TimeoutError:
                assert self._on_silence is not None
                self._on_silence()
            except OSError:
                raise LineClosed from None


def _groups(pieces: Sequence[Any]) -> Iterator[Sequence[Any]]:
    if sum(len(piece) for piece in pieces) < _JOIN:
        yield [b"".join(pieces)]
        return
    for start in range(0, len(pieces), _MOST_PIECES):
        yield pieces[start : start + _MOST_PIECES]


def _padded(size: int) -> int:
    return size + -size % _ALIGN
