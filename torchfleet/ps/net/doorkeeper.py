"""Limits what a peer may send over a TCP connection before its first message, and within one message.

ZeroMQ delivers whole messages, and has a single size limit for frames, before the handshake and after it. So the
doorkeeper regularly asks the kernel how many bytes each connection has received, and shuts down a connection with too
many; ZeroMQ then frees its buffers. The connections ignore resets (packet_filter.py). Linux and tcp:// only;
elsewhere nothing is watched.
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

from torchfleet.ps.net.packet_filter import take_no_packets, take_no_resets
from torchfleet.ps.net.wire import MAX_FRAME

MAX_FIRST = 1 << 16  # bytes before the first message: greeting, handshake, and that message
MAX_MESSAGE = MAX_FRAME + (1 << 24)  # bytes of an incomplete message
MAX_STRANGERS = 256  # connections per address that are older than STRANGER_AGE and have sent no message
STRANGER_AGE = 3.0  # seconds
GRACE = 0.1  # seconds in which ZeroMQ's thread delivers what the kernel has received
_PATIENCE_MS = 1000  # wait for ZeroMQ's event that the socket listens
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_RECEIVED = struct.Struct("<Q")  # tcpi_bytes_received of struct tcp_info
_OFFSET = 128
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # struct linger: the peer learns at once that the connection has ended


@dataclass(slots=True)
class Door:
    """One connection."""

    address: str
    since: float
    is_known: bool = False  # it has sent a message
    base: int = 0  # bytes received when the last message was complete
    over_since: float | None = None  # when it was first found over the limit
    suspected: int | None = None  # the turn when it had been so for GRACE: complete messages are in the queue by then


class Doorkeeper:
    """Watches the connections of one socket. Owned by the thread that serves."""

    def __init__(self, listening: zmq.Socket[bytes], endpoint: str) -> None:
        """Make the doorkeeper before binding `listening`."""
        self._doors: dict[int, Door] = {}
        self._turn = 0  # counts requests, and jumps ahead when the queue is empty
        self.news: list[str] = []  # connections that were shut down and why, for the log
        self._condemned: list[tuple[int, str]] = []  # to be shut down; added since the last look
        self._told: list[tuple[int, str]] = []  # to be shut down; added before the last look: peers could read why
        self._spoken: set[int] = set()  # connections that have sent a message since the last look
        self._is_watching = endpoint.startswith("tcp://") and sys.platform == "linux"
        self._listening = listening
        events = zmq.EVENT_LISTENING | (_EVENTS if self._is_watching else 0)
        self._monitor: zmq.Socket[Any] = listening.get_monitor_socket(events)

    def listening(self) -> socket.socket | None:
        """A duplicate of the listening file descriptor, or None. Call it once, after binding the socket, before the
        first request is received: it lets all connections ignore resets.
        """
        if not self._monitor.poll(_PATIENCE_MS):
            return None
        handle = socket.socket(fileno=os.dup(recv_monitor_message(self._monitor)["value"]))
        handle.setblocking(False)
        if self._is_watching:
            try:
                take_no_resets(handle)
            except OSError as error:
                self.news.append(f"this system cannot filter resets ({error}): a hostile client can end this server")
        return handle

    def note(self, frame: zmq.Frame) -> None:
        """Note that a message has arrived."""
        self._turn += 1
        if self._is_watching:
            self._spoken.add(_source(frame))

    def shut_later(self, frame: zmq.Frame, why: str) -> None:
        """Shut down the connection that sent `frame`, after its peer had time to read the reason."""
        self._condemned.append((_source(frame), why))

    def rest(self) -> None:
        """Note that the queue is empty: every complete message has been noted."""
        self._turn += len(self._doors) + 1

    def look(self, now: float) -> None:
        """Shut down connections that have sent too much, or that `shut_later` has named."""
        if not self._is_watching:
            return
        self._follow_events(now)
        spoken, self._spoken = self._spoken, set()  # after the events: a speaker may have connected since the last look
        for number, why in self._told:
            self.shut(number, why)
        self._told, self._condemned = self._condemned, []
        for number, door in list(self._doors.items()):
            received = _received(number)
            if number in spoken:
                door.is_known, door.base, door.over_since, door.suspected = True, received, None, None
            self._judge(number, door, received - door.base, now)
        self._thin_out(now)

    def _judge(self, number: int, door: Door, num_bytes: int, now: float) -> None:
        """Shut down a connection with too many bytes of an incomplete message.

        The message may be complete. GRACE lets it reach the queue, and the turns after it let it be received.
        """
        limit = MAX_MESSAGE if door.is_known else MAX_FIRST
        if num_bytes <= limit:
            return
        if door.over_since is None:
            door.over_since = now
        elif door.suspected is None:
            door.suspected = self._turn if now - door.over_since >= GRACE else None
        elif self._turn - door.suspected > len(self._doors):
            what = "of one message" if door.is_known else "before its first message"
            self.shut(number, f"{num_bytes:,} bytes {what}, at most {limit:,}")

    def shut(self, number: int, why: str) -> None:
        """Shut down the connection with file descriptor `number`: ZeroMQ reads what has arrived, and closes it."""
        door = self._doors.pop(number, None)
        if door is None:
            return
        with contextlib.suppress(OSError), _borrowed(number) as connection:
            take_no_packets(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            connection.shutdown(socket.SHUT_RD)
        self.news.append(f"ended a connection from {door.address}: {why}")

    def shut_newest(self, num: int) -> None:
        """Shut down the `num` connections that were accepted last."""
        for number in list(reversed(self._doors))[:num] if num else ():
            self.shut(number, "the server has no file descriptor for it")

    def close(self) -> None:
        self._listening.disable_monitor()
        self._monitor.close(linger=0)  # an open socket would block the end of its context

    def _follow_events(self, now: float) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._accept(int(event["value"]), now)
                else:
                    self._doors.pop(int(event["value"]), None)

    def _accept(self, number: int, now: float) -> None:
        self._doors[number] = Door(_address(number), now)
        with contextlib.suppress(OSError), _borrowed(number) as connection:
            take_no_resets(connection)  # it may have come before the listening socket had its filter

    def _thin_out(self, now: float) -> None:
        """Shut down the oldest silent connections of each address that has too many."""
        by_address: dict[str, list[int]] = {}
        for number, door in self._doors.items():
            if not door.is_known and now - door.since > STRANGER_AGE:
                by_address.setdefault(door.address, []).append(number)
        for numbers in by_address.values():
            for number in numbers[: max(0, len(numbers) - MAX_STRANGERS)]:
                self.shut(number, f"more than {MAX_STRANGERS} connections from there have sent no message")


def _source(frame: zmq.Frame) -> int:
    """The file descriptor of the connection that sent a frame; -1 if ZeroMQ does not say (old ZMTP versions)."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """ZeroMQ's socket with this file descriptor. ZeroMQ still owns it and closes it."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=number)
    try:
        yield connection
    finally:
        connection.detach()


def _received(number: int) -> int:
    """Bytes that a connection has received; 0 if it is gone."""
    with contextlib.suppress(OSError), _borrowed(number) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFSET + _RECEIVED.size)
        return int(_RECEIVED.unpack_from(info, _OFFSET)[0]) if len(info) >= _OFFSET + _RECEIVED.size else 0
    return 0


def _address(number: int) -> str:
    with contextlib.suppress(OSError), _borrowed(number) as connection:
        return str(connection.getpeername()[0])
    return "an unknown address"
