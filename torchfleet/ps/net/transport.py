"""The interfaces of a transport, which carries frames between clients and servers; and the in-process transport.

A client sees a Channel to one server. A server receives requests as (peer, frames) and replies to the peer. Only the
transport knows what a peer is. net/addresses.py maps addresses to transports.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from torchfleet.base.errors import FleetError
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.wire import Frame, Role

TICK = 0.05  # seconds between two calls of Handler.tick

Peer = object


class Channel(Protocol):
    """One client's connection to one server. Messages may be lost, repeated or reordered, but never arrive in part."""

    def send(self, frames: Sequence[Frame]) -> bool:
        """Queue a message without blocking. Returns False if the queue is full."""

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        """The next message, or None after `timeout` seconds without one."""

    def reconnect(self) -> None:
        """Drop all queued messages and connect again."""

    def close(self) -> None: ...

    def now(self) -> float:
        """The time in seconds, on the clock of this channel's time-outs."""

    def wakes(self) -> tuple[object, ...]:
        """Objects that a server which owns this channel can poll together with its requests: as Handler.wakes."""


class HandlerRefusals(Protocol):
    """Encodes and logs refusals that the transport itself makes."""

    def of_request(self, frames: Sequence[Frame], error: FleetError) -> list[Frame]:
        """The error reply to a request that the transport does not pass to the server."""

    def of_reply(self, reply: Sequence[Frame], error: FleetError) -> list[Frame]:
        """The error reply to send instead of a reply that is withheld."""

    def note(self, text: str) -> None:
        """Log a refusal without a reply. `text`: which peer was refused, and why."""


class Handler(Protocol):
    """The server as a transport sees it. The transport makes one call at a time."""

    @property
    def refusals(self) -> HandlerRefusals: ...

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> list[tuple[Peer, list[Frame]]]:
        """Serve one request. Returns the replies that are ready, to this or other peers.

        `role`: the role that the transport has proved; None if it proved none.
        """

    def ready(self) -> list[tuple[Peer, list[Frame]]]:
        """Return the replies that `work` has made ready. Call it after each slice that did something."""

    def tick(self, now: float) -> list[tuple[Peer, list[Frame]]]:
        """Set the time to `now`. Returns the replies that are due by then, and all others that are ready. Call it every
        TICK seconds."""

    def work(self) -> bool | None:
        """Do one slice of long work, and return True. Returns None if there is no work, False if it waits for a disk
        and did nothing."""

    def rest(self) -> bool:
        """Do some work that was postponed in favour of requests. Returns whether more is left. Call it when no request
        waits."""

    def wakes(self) -> tuple[object, ...]:
        """File descriptors, or sockets of the same transport, that become readable when `work` has something to do
        without a request."""


class LookAhead(Protocol):
    """What a server does for requests that wait in the queue."""

    @property
    def is_on(self) -> bool:
        """Whether there is anything to do for waiting requests."""

    def note(self, frames: Sequence[Frame]) -> None:
        """Called when a request was received. It is handled after the requests before it."""


class ServerSocket(Protocol):
    """A server's socket: one queue of requests of all clients, served one after the other."""

    endpoint: str  # the address that clients connect to
    look_ahead: LookAhead | None  # is told of waiting requests, by a transport that has a queue

    def serve(self, handler: Handler, is_over: Callable[[], bool]) -> None:
        """Answer requests until `is_over()`, which is called after every request and many times a second."""

    def close(self) -> None: ...


class Transport(Protocol):
    """Listens on and connects to the addresses of one scheme."""

    def listen(self, endpoint: str, keys: KeyFolder | None, insecure: bool) -> ServerSocket:
        """Listen at an address. Raises SecurityError if other machines can reach it and there are neither keys nor
        `insecure`, FleetError if the address is not available."""

    def connect(self, endpoint: str, keys: KeyFolder | None, role: Role) -> Channel:
        """A channel to the server at an address. The server need not be there yet. Raises FleetError if `endpoint` is
        not an address."""


class InProcess:
    """A server in the same process, without an address. A request is a function call, with arrays by reference."""

    def __init__(self, server: Handler) -> None:
        self._server = server
        self.is_busy: bool | None = None  # the last result of Handler.work
        self._next_tick = 0.0
        self._lock = threading.Lock()  # a table has one owner at a time: here, the calling thread

    def connect(self) -> InProcessChannel:
        return InProcessChannel(self)

    def call(self, channel: InProcessChannel, frames: Sequence[Frame] | None) -> None:
        """One turn of a server's loop: a request, a slice of work, and every TICK seconds a tick."""
        with self._lock:
            ready = self._server.handle(channel, frames, None) if frames is not None else []
            self.is_busy = self._server.work()  # after `handle`: work that the request brought begins at once
            if self.is_busy:
                ready += self._server.ready()
            now = time.monotonic()
            if not ready or now >= self._next_tick:
                self._server.rest()
            if now >= self._next_tick:
                self._next_tick = now + TICK
                ready += self._server.tick(now)
        for peer, reply in ready:
            if isinstance(peer, InProcessChannel):
                peer.deliver(reply)


class InProcessChannel:
    """One client of an InProcess server."""

    def __init__(self, transport: InProcess) -> None:
        self._transport = transport
        self._replies: deque[Sequence[Frame]] = deque()
        self._arrived = threading.Condition()

    def send(self, frames: Sequence[Frame]) -> bool:
        self._transport.call(self, frames)
        return True

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        deadline = time.monotonic() + timeout
        while True:
            with self._arrived:
                if not self._replies:
                    pause = {None: TICK, False: 0.001, True: 0.0}[self._transport.is_busy]
                    self._arrived.wait(min(pause, max(0.0, deadline - time.monotonic())))
                if self._replies:
                    return self._replies.popleft()
            if time.monotonic() >= deadline:
                return None
            self._transport.call(self, None)  # this server has no loop: nothing else calls its tick

    def deliver(self, frames: Sequence[Frame]) -> None:
        with self._arrived:
            self._replies.append(frames)
            self._arrived.notify()

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        self._replies.clear()

    def now(self) -> float:
        return time.monotonic()

    def wakes(self) -> tuple[object, ...]:
        return ()  # no server polls a server in its own process
