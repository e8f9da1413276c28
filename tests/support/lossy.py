"""A network that loses, repeats, delays and reorders messages by seed, on virtual time: nothing here ever sleeps.

All channels of a Network share its clock, which only `receive` moves. Servers are called in process.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchfleet.ps.net.transport import Handler
from torchfleet.ps.net.wire import Frame

NEVER = 1e9


@dataclass(frozen=True)
class Faults:
    """How bad a network is: shares of messages (0 to 1) and seconds."""

    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0  # mean; exponential, so that messages overtake each other
    refuse: float = 0.0  # share of sends for which there is no room


class Network:
    """Messages under way, in the order of their arrival."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.now = 0.0
        self.dice = random.Random(seed)
        self._faults = faults
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()

    def connect(self, server: Handler) -> LossyChannel:
        return LossyChannel(self, server)

    def has_room(self) -> bool:
        return self.dice.random() >= self._faults.refuse

    def carry(self, deliver: Callable[[], None]) -> None:
        """Take a message in: it arrives once, more than once, or not at all."""
        while self.dice.random() >= self._faults.lose:
            delay = self.dice.expovariate(1 / self._faults.delay) if self._faults.delay else 0.0
            heapq.heappush(self._under_way, (self.now + delay, next(self._ties), deliver))
            if self.dice.random() >= self._faults.repeat:
                break

    def advance(self, until: float, is_enough: Callable[[], bool]) -> None:
        """Let messages arrive until it is enough, or up to a moment."""
        while not is_enough() and self._under_way and self._under_way[0][0] <= until:
            arrival, _, deliver = heapq.heappop(self._under_way)
            self.now = max(self.now, arrival)
            deliver()
        if not is_enough():
            self.now = max(self.now, until)

    def deliver_all(self) -> None:
        """Let everything arrive that is still under way, however late."""
        self.advance(self.now + NEVER, lambda: not self._under_way)


class LossyChannel:
    """One client's way to one server through the network."""

    def __init__(self, network: Network, server: Handler) -> None:
        self._network, self.server = network, server
        self._inbox: deque[list[bytes]] = deque()
        self._connection = 0
        self.num_reconnects = 0
        self.sent_at: list[float] = []

    def send(self, frames: Sequence[Frame]) -> bool:
        if not self._network.has_room():
            return False
        self.sent_at.append(self._network.now)
        copy, connection = [bytes(memoryview(frame)) for frame in frames], self._connection
        self._network.carry(lambda: self._arrive(copy, connection))
        return True

    def receive(self, timeout: float) -> list[bytes] | None:
        self._network.advance(self._network.now + timeout, lambda: bool(self._inbox))
        return self._inbox.popleft() if self._inbox else None

    def reconnect(self) -> None:
        """Replies on the old connection are lost; requests on it may still arrive at the server."""
        self.num_reconnects += 1
        self._connection += 1
        self._inbox.clear()

    def close(self) -> None:
        self.reconnect()

    def now(self) -> float:
        return self._network.now

    def _arrive(self, frames: list[bytes], connection: int) -> None:
        for peer, reply in self.server.handle((self, connection), frames, None):
            copy = [bytes(memoryview(frame)) for frame in reply]
            peer[0]._network.carry(lambda peer=peer, copy=copy: peer[0]._take(copy, peer[1]))

    def _take(self, frames: list[bytes], connection: int) -> None:
        if connection == self._connection:
            self._inbox.append(frames)
