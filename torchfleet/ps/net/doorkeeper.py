"""Watches a server's TCP connections: what a peer may send before its first message, and within one message.

ZeroMQ hands messages over whole, and has one limit for all frames, before a handshake and after it. So the system is
asked now and then how many bytes a connection has received, and one with too many is shut down: ZeroMQ then drops what
it held for it. Linux only; elsewhere, and for ipc://, nothing is watched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from torchfleet.ps.net.wire import MAX_FRAME

MAX_FIRST = 1 << 16  # bytes before the first message: greeting, handshake, and that message
MAX_MESSAGE = MAX_FRAME + (1 << 24)  # bytes of a message that is not complete
MAX_STRANGERS = 256  # connections per address that have been there for a while without a message
STRANGER_AGE = 3.0  # seconds
_PATIENCE_MS = 1000  # for the report of a socket that listens already
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_RECEIVED = struct.Struct("<Q")  # tcpi_bytes_received of struct tcp_info
_OFFSET = 128


@dataclass(slots=True)
class Door:
    """One connection."""

    address: str
    since: float
    is_known: bool = False  # a message has come from it
    base: int = 0  # bytes received when the last message was complete
    suspected: int | None = None  # the turn at which it had sent too much


class Doorkeeper:
    """Belongs to the thread that serves."""

    def __init__(self, listening: zmq.Socket[bytes], endpoint: str) -> None:
        """Must be made before `listening` is bound."""
        self._doors: dict[int, Door] = {}
        self._turn = 0  # counts requests, and jumps when there was none
        self.news: list[str] = []  # what was shut down and why, for the log
        self._condemned: list[tuple[int, str]] = []  # since the last look
        self._told: list[tuple[int, str]] = []  # before it: their peers could read why
        self._spoken: set[int] = set()  # connections that messages have come from since the last look
        self._is_watching = endpoint.startswith("tcp://") and sys.platform == "linux"
        self._listening = listening
        events = zmq.EVENT_LISTENING | (_EVENTS if self._is_watching else 0)
        self._monitor: zmq.Socket[Any] = listening.get_monitor_socket(events)

    def listening(self) -> socket.socket | None:
        """A second handle of what the socket listens with; to be asked for once, after it was bound."""
        if not self._monitor.poll(_PATIENCE_MS):
            return None
        handle = socket.socket(fileno=os.dup(recv_monitor_message(self._monitor)["value"]))
        handle.setblocking(False)
        return handle

    def note(self, frame: zmq.Frame) -> None:
        """A message is here."""
        self._turn += 1
        if self._is_watching:
            self._spoken.add(_source(frame))

    def shut_later(self, frame: zmq.Frame, why: str) -> None:
        """End the connection that this came from, once its peer could read why."""
        self._condemned.append((_source(frame), why))

    def rest(self) -> None:
        """No message is waiting: whoever has sent one is known by now."""
        self._turn += len(self._doors) + 1

    def look(self, now: float) -> None:
        """Shut down what has sent too much."""
        if not self._is_watching:
            return
        self._follow_events(now)
        spoken, self._spoken = self._spoken, set()  # after the events: it may have come since the last look, too
        for number, why in self._told:
            self.shut(number, why)
        self._told, self._condemned = self._condemned, []
        for number, door in list(self._doors.items()):
            received = _received(number)
            if number in spoken:
                door.is_known, door.base, door.suspected = True, received, None
            limit = MAX_MESSAGE if door.is_known else MAX_FIRST
            if received - door.base <= limit:
                continue
            if door.suspected is None:  # its message may be in the queue: it is waited for
                door.suspected = self._turn
            elif self._turn - door.suspected > len(self._doors):
                what = "of one message" if door.is_known else "before its first message"
                self.shut(number, f"{received - door.base:,} bytes {what}, at most {limit:,}")
        self._thin_out(now)

    def shut(self, number: int, why: str) -> None:
        """End a connection, by its file descriptor."""
        door = self._doors.pop(number, None)
        if door is None:
            return
        with contextlib.suppress(OSError), _borrowed(number) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        self.news.append(f"ended a connection from {door.address}: {why}")

    def close(self) -> None:
        self._listening.disable_monitor()
        self._monitor.close(linger=0)  # an open socket would keep its context from ending

    def _follow_events(self, now: float) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._doors[int(event["value"])] = Door(_address(int(event["value"])), now)
                else:
                    self._doors.pop(int(event["value"]), None)

    def _thin_out(self, now: float) -> None:
        """Of an address with too many connections that say nothing, those that are here longest go."""
        by_address: dict[str, list[int]] = {}
        for number, door in self._doors.items():
            if not door.is_known and now - door.since > STRANGER_AGE:
                by_address.setdefault(door.address, []).append(number)
        for numbers in by_address.values():
            for number in numbers[: max(0, len(numbers) - MAX_STRANGERS)]:
                self.shut(number, f"more than {MAX_STRANGERS} connections from there have sent no message")


def _source(frame: zmq.Frame) -> int:
    """The file descriptor of the connection that a frame came through; -1: one of an old ZMTP, that does not say it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """ZeroMQ's socket with this file descriptor, which it closes itself."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=number)
    try:
        yield connection
    finally:
        connection.detach()


def _received(number: int) -> int:
    """Bytes that have arrived for a connection; 0 if it is gone."""
    with contextlib.suppress(OSError), _borrowed(number) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFSET + _RECEIVED.size)
        return int(_RECEIVED.unpack_from(info, _OFFSET)[0]) if len(info) >= _OFFSET + _RECEIVED.size else 0
    return 0


def _address(number: int) -> str:
    with contextlib.suppress(OSError), _borrowed(number) as connection:
        return str(connection.getpeername()[0])
    return "an unknown address"
