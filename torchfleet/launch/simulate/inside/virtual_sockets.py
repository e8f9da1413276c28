"""The transport of a simulated process, in place of ZeroMQ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from torchfleet.base.errors import FleetError
from torchfleet.base.network_links import message_seconds
from torchfleet.launch.simulate.inside.actors import Mailbox, Schedule
from torchfleet.launch.simulate.packets import Address, Packet
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.transport import TICK, Handler, LookAhead, Peer
from torchfleet.ps.net.wire import Frame, Role

LISTENER = 0  # the mailbox of a server; the mailboxes of channels follow
_THERE_AND_BACK = 2


class VirtualNetwork:
    """Replaces tcp:// in a simulated process. `servers`: address → number of the server's process."""

    def __init__(self, schedule: Schedule, servers: Mapping[str, int], service: Callable[[int], float]) -> None:
        """`service`: bytes of a request → service time that is added to the measured processor time."""
        self._schedule, self._servers, self._service = schedule, servers, service
        self._numbers = itertools.count(LISTENER + 1)

    def listen(self, endpoint: str, keys: KeyFolder | None, insecure: bool) -> VirtualListener:
        """Implements Transport.listen."""
        if self._servers.get(endpoint) != self._schedule.index:
            raise FleetError(f"cannot listen on {endpoint}: {self._places('it is not the address of this server')}")
        return VirtualListener(self._schedule, endpoint, self._service)

    def connect(self, endpoint: str, keys: KeyFolder | None, role: Role) -> VirtualChannel:
        """Implements Transport.connect."""
        if endpoint not in self._servers:
            raise FleetError(f"not an address to connect to: {endpoint!r}; {self._places('no process listens there')}")
        return VirtualChannel(self._schedule, endpoint, self._servers[endpoint], next(self._numbers))

    def _places(self, why: str) -> str:
        return f"{why} in this simulation, whose servers are {', '.join(self._servers)}"


class VirtualChannel:
    """A Channel to one server."""

    def __init__(self, schedule: Schedule, endpoint: str, server: int, number: int) -> None:
        self._schedule, self._server = schedule, server
        self._mailbox = Mailbox(schedule, number, f"an answer of {endpoint}")

    def send(self, frames: Sequence[Frame]) -> bool:
        self._schedule.reach()
        _post(self._schedule, (self._server, LISTENER), self._mailbox.number, frames)
        self._schedule.go_on()
        return True

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        packet = self._mailbox.take(timeout)
        if packet is not None:
            self._schedule.spend(_cost(packet))
        self._schedule.go_on()
        return packet.frames if packet is not None else None

    def reconnect(self) -> None:
        """Does nothing: the virtual network loses no messages."""

    def close(self) -> None:
        self._mailbox.close()

    def now(self) -> float:
        return self._schedule.now()

    def wakes(self) -> tuple[object, ...]:
        return ()  # servers of a simulation have no replicas


class VirtualListener:
    """A ServerSocket: the loop of net/sockets.py in virtual time. There is no disk, so nothing is read ahead."""

    look_ahead: LookAhead | None = None

    def __init__(self, schedule: Schedule, endpoint: str, service: Callable[[int], float]) -> None:
        self.endpoint, self._schedule, self._service = endpoint, schedule, service
        self._mailbox = Mailbox(schedule, LISTENER, "requests")

    def serve(self, handler: Handler, is_over: Callable[[], bool]) -> None:
        """Implements ServerSocket.serve."""
        schedule, next_tick, worked = self._schedule, 0.0, None
        while not is_over():
            handler.rest()
            packet = self._mailbox.take({None: TICK, False: 0.001, True: 0.0}[worked])
            if packet is not None:
                schedule.spend(_cost(packet) + self._service(packet.num_bytes))
            schedule.go_on()
            if packet is not None:
                self._reply(handler.handle(packet.sender, packet.frames, None))
            worked = handler.work()
            now = schedule.now()
            if worked:
                self._reply(handler.ready())
            if now >= next_tick:
                self._reply(handler.tick(now))
                next_tick = now + TICK

    def close(self) -> None:
        self._mailbox.close()

    def _reply(self, replies: Sequence[tuple[Peer, list[Frame]]]) -> None:
        for peer, frames in replies:
            assert isinstance(peer, tuple)
            self._schedule.reach()
            _post(self._schedule, peer, LISTENER, frames)
            self._schedule.go_on()


def _post(schedule: Schedule, to: Address, box: int, frames: Sequence[Frame]) -> None:
    num_bytes = sum(memoryview(frame).nbytes for frame in frames)
    schedule.spend(message_seconds(len(frames), num_bytes))
    schedule.post(to, box, frames, _THERE_AND_BACK)


def _cost(packet: Packet) -> float:
    return message_seconds(len(packet.sizes), packet.num_bytes)
