"""What a transport is: how frames travel between clients and servers; and the one inside a process.

A client sees a Channel to one server. A server sees requests as (peer, frames) and answers to the peer; what a peer
is, only the transport knows. net/addresses.py says which transport serves which addresses.
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

TICK = 0.05  # seconds between two looks of a server at the clock

Peer = object


class Channel(Protocol):
    """One client's way to one server. Frames may be lost, repeated or reordered; they arrive whole or not at all."""

    def send(self, frames: Sequence[Frame]) -> bool:
        """Hand a message over without waiting; False if there is no room for it now."""

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        """The next message, or None after `timeout` seconds without one."""

    def reconnect(self) -> None:
        """Give up whatever is under way and start anew."""

    def close(self) -> None: ...

    def now(self) -> float:
        """Seconds, as this channel's time-outs count them."""

    def wakes(self) -> tuple[object, ...]:
        """What a server that has this channel can wait for beside its requests: as Handler.wakes."""


class HandlerRefusals(Protocol):
    """What a transport turns away itself: how the peer is told, and the server's log."""

    def of_request(self, frames: Sequence[Frame], error: FleetError) -> list[Frame]:
        """The reply to a request that is not passed on: its peer is told why."""

    def of_reply(self, reply: Sequence[Frame], error: FleetError) -> list[Frame]:
        """What takes the place of a reply that is not sent."""

    def note(self, text: str) -> None:
        """Something was refused without a reply: whose it was, and why."""


class Handler(Protocol):
    """What a transport needs of a server."""

    @property
    def refusals(self) -> HandlerRefusals: ...

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> list[tuple[Peer, list[Frame]]]:
        """Replies that are now ready, to this or to other peers. `role` is what the transport proved, if it did."""

    def ready(self) -> list[tuple[Peer, list[Frame]]]:
        """Replies that work has made ready. To be asked for after each slice that did something."""

    def tick(self, now: float) -> list[tuple[Peer, list[Frame]]]:
        """It is `now`: replies that became due by the passing of time, and those that are ready. To be called every
        TICK seconds."""

    def work(self) -> bool | None:
        """One slice of long work. None: there is none; False: it waits for a disk and could do nothing."""

    def rest(self) -> bool:
        """No request waits: what was put off in favour of requests is due. Returns whether more of it is left."""

    def wakes(self) -> tuple[object, ...]:
        """File descriptors, or what channels of the same transport have, that can be read when `work` has something to
        do that no request brought."""


class ServerSocket(Protocol):
    """A server's end: requests of all clients come in one queue, to be answered one after the other."""

    endpoint: str  # the address that clients connect to

    def serve(self, handler: Handler, is_over: Callable[[], bool]) -> None:
        """Answer requests until `is_over`, which is looked at after every request and many times a second."""

    def close(self) -> None: ...


class Transport(Protocol):
    """What serves the addresses of one scheme."""

    def listen(self, endpoint: str, keys: KeyFolder | None, insecure: bool) -> ServerSocket:
        """A server's end at this address. Raises SecurityError if other machines could reach it and there are neither
        keys nor `insecure`, FleetError if it cannot be had."""

    def connect(self, endpoint: str, keys: KeyFolder | None, role: Role) -> Channel:
        """A client's way to the server at this address, whether it is there yet or not. Raises FleetError if this is
        not an address."""


class InProcess:
    """A server in this very process, without an address: a request is a function call, arrays pass by reference."""

    def __init__(self, server: Handler) -> None:
        self._server = server
        self.is_busy: bool | None = None  # what Handler.work said last
        self._next_tick = 0.0
        self._lock = threading.Lock()  # a table has one owner at a time: here, the thread that is calling

    def connect(self) -> InProcessChannel:
        return InProcessChannel(self)

    def call(self, channel: InProcessChannel, frames: Sequence[Frame] | None) -> None:
        """What the loop of a socket does: take a request, a slice of work, and every TICK seconds look at the clock."""
        with self._lock:
            ready = self._server.handle(channel, frames, None) if frames is not None else []
            self.is_busy = self._server.work()  # after it: the request may have brought work, which then begins at once
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
            self._transport.call(self, None)  # nothing else watches the clock of a server without a loop

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
        return ()  # no server waits for another in its own process
