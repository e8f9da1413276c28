"""A network between named machines: messages are lost, repeated, delayed and reordered; links break, also one way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.lossy import Faults

from torchfleet.ps.net.wire import Frame

if TYPE_CHECKING:
    from support.faults.virtual_world import World

Frames = list[bytes]
LATENCY = 0.001  # seconds


@dataclass(frozen=True)
class Break:
    """No message gets from `source` to `target` (None: any machine) before `until`."""

    source: str | None
    target: str | None
    until: float

    def stops(self, source: str, target: str, now: float) -> bool:
        return now < self.until and self.source in (None, source) and self.target in (None, target)


def machine_of(name: str) -> str:
    """Behind "#" is which of the machine's connections it is."""
    return name.partition("#")[0]


class Network:
    """All links, as bad as `faults`, until they are healed."""

    def __init__(self, world: World, faults: Faults) -> None:
        self.world, self.faults = world, faults
        self._breaks: list[Break] = []
        self.num_carried = self.num_lost = 0

    def cut(self, source: str | None, target: str | None, seconds: float) -> None:
        """One way; for both ways cut both."""
        self._breaks.append(Break(source, target, self.world.now + seconds))

    def mend(self, one: str, other: str) -> None:
        """The link between these two, both ways."""
        ends = {one, other}
        self._breaks = [broken for broken in self._breaks if {broken.source, broken.target} != ends]

    def heal(self) -> None:
        """From now on every message arrives, once, soon, and in order."""
        self._breaks, self.faults = [], Faults()

    def carry(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Take a message in: it arrives once, more than once, or not at all."""
        dice = self.world.dice
        self.num_carried += 1
        while dice.random() >= self.faults.lose:
            delay = dice.expovariate(1 / self.faults.delay) if self.faults.delay else 0.0
            self.world.after(LATENCY + delay, lambda: self._arrive(source, target, deliver))
            if dice.random() >= self.faults.repeat:
                return
        self.num_lost += 1

    def _arrive(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        ends = machine_of(source), machine_of(target)
        if any(broken.stops(*ends, self.world.now) for broken in self._breaks):
            self.num_lost += 1
        else:
            deliver()


class Doors:
    """What listens where: a request that arrives at a name goes to the process behind it now; replies go to a peer."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.behind: dict[str, Callable[[bytes, Frames], None]] = {}
        self._channels: dict[bytes, SimulatedChannel] = {}

    def connect(self, client: str, server: str) -> SimulatedChannel:
        return SimulatedChannel(self, client, server)

    def listen(self, channel: SimulatedChannel, peer: bytes) -> None:
        self._channels[peer] = channel

    def forget(self, peer: bytes) -> None:
        self._channels.pop(peer, None)

    def request(self, channel: SimulatedChannel, frames: Frames) -> None:
        peer, server = channel.peer, channel.server

        def arrive() -> None:
            take = self.behind.get(server)
            if take is not None:
                take(peer, frames)

        self.network.carry(channel.client, server, arrive)

    def reply(self, server: str, peer: bytes, frames: Sequence[Frame]) -> None:
        copy = [bytes(memoryview(frame).cast("B")) if len(frame) else b"" for frame in frames]
        client = peer.decode().split("/")[0]

        def arrive() -> None:
            channel = self._channels.get(peer)
            if channel is not None:
                channel.take(copy)

        self.network.carry(server, client, arrive)


class SimulatedChannel:
    """One client's way to one server (a Channel). Its owner waits in virtual time."""

    _numbers = 0

    def __init__(self, doors: Doors, client: str, server: str) -> None:
        self._doors, self.client, self.server = doors, client, server
        self._world = doors.network.world
        self._inbox: deque[Frames] = deque()
        self._number = 0
        self.peer = b""
        self.num_sent = 0
        self.arrived: Callable[[], None] = lambda: None  # called when something has
        self._open()

    def send(self, frames: Sequence[Frame]) -> bool:
        network = self._doors.network
        if network.faults.refuse and self._world.dice.random() < network.faults.refuse:
            return False
        copy = [bytes(memoryview(frame).cast("B")) if len(frame) else b"" for frame in frames]
        self.num_sent += 1
        self._doors.request(self, copy)
        return True

    def receive(self, timeout: float) -> Frames | None:
        actor, until = self._world.current, self._world.now + timeout
        while not self._inbox and self._world.now < until:
            assert actor is not None, "only actors wait"
            self._waiting = actor
            actor.wait(until - self._world.now)
        return self._inbox.popleft() if self._inbox else None

    def reconnect(self) -> None:
        """Replies on the old connection are lost; requests on it may still arrive."""
        self._doors.forget(self.peer)
        self._inbox.clear()
        self._open()

    def close(self) -> None:
        self._doors.forget(self.peer)

    def now(self) -> float:
        return self._world.clock.monotonic()

    def wakes(self) -> tuple[object, ...]:
        return ()  # `arrived` is told

    def take(self, frames: Frames) -> None:
        self._inbox.append(frames)
        if self._waiting is not None:
            self._waiting.wake()
        self.arrived()

    def _open(self) -> None:
        self._number += 1
        self.peer = f"{self.client}/{self.server}/{self._number}".encode()
        self._waiting = None
        self._doors.listen(self, self.peer)
