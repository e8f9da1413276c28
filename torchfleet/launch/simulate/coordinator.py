"""Runs the processes of a simulated job one at a time, in the order of virtual time, and delivers their packets."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torchfleet.base.errors import FleetError
from torchfleet.base.network_links import Link, Port
from torchfleet.launch.simulate.conditions import Part
from torchfleet.launch.simulate.inside.actors import NEVER
from torchfleet.launch.simulate.packets import (
    COORDINATOR,
    DESCRIBE,
    ENDED,
    GRANT,
    STEPS,
    Line,
    LineClosed,
    Packet,
    Turn,
)
from torchfleet.launch.simulate.trace import Trace

Result = TypeVar("Result")

_HEADER_BYTES = 100  # bytes of a message on the network in addition to its frames
_STUCK_SECONDS = 60.0  # virtual seconds without compute of any worker that count as a deadlock
_PERIOD = 0.01  # virtual seconds between two records of how busy a process was
_IDLE_SHARE = 0.01  # a worker that computes less than this share of its time sends only heartbeats


class ProcessFailed(FleetError):
    """A process of the job ended unexpectedly."""

    def __init__(self, part: Part, text: str) -> None:
        super().__init__(text)
        self.part = part


class Member:
    """A process of the job, as the coordinator sees it."""

    def __init__(self, part: Part, line: Line, link: Link) -> None:
        self.part, self._line, self._link = part, line, link
        self._out, self._in = Port(link), Port(link)
        self._arriving: list[tuple[float, int, Packet]] = []  # by arrival time of the first byte
        self._answers: list[Packet] = []  # from the coordinator
        self._order = itertools.count()
        self._own_next = 0.0  # when it continues without a packet
        self.next_at = 0.0  # when it continues
        self.ended = False
        self.is_stuck = False
        self.busy = 0.0
        self.history: list[tuple[float, float]] = [(0.0, 0.0)]  # at intervals: the time, and its busy seconds so far
        self.code = 0

    def leave_port(self, packet: Packet) -> float:
        """Return the time when the first byte of a packet of this process reaches the other end of the link."""
        return self._out.begin(packet.time, packet.num_bytes + _HEADER_BYTES) + self._link.latency

    def expect(self, packet: Packet, first_byte: float) -> None:
        heapq.heappush(self._arriving, (first_byte, next(self._order), packet))
        self._find_next()

    def answer(self, packet: Packet) -> None:
        self._answers.append(packet)
        self._find_next()

    def meet(self) -> None:
        """Block until the process has started and waits for its first turn. Raises LineClosed."""
        self._line.receive()

    def run(self, until: float) -> Turn:
        """Let the process run. No packet that is not yet known can reach it before `until`. Raises LineClosed."""
        packets, self._answers = self._answers, []
        while self._arriving and self._arriving[0][0] < until:
            first_byte, _, packet = heapq.heappop(self._arriving)
            packet.time = self._in.end(first_byte, packet.num_bytes + _HEADER_BYTES)
            packets.append(packet)
        packets.sort(key=lambda packet: packet.time)
        self._line.send(Turn(GRANT, until, packets=packets))
        turn = self._line.receive()
        self._own_next, self.is_stuck, self.busy = turn.time, turn.is_stuck, turn.busy
        if self.next_at < NEVER and self.next_at - self.history[-1][0] > _PERIOD:
            self.history.append((self.next_at, turn.busy))
        if turn.kind == ENDED:
            self.ended, self.code, self._own_next = True, turn.code, NEVER
            self._arriving.clear()
        self._find_next()
        return turn

    def describe(self) -> str:
        """What its threads wait for."""
        self._line.send(Turn(DESCRIBE))
        return f"  {self.part.name}: {bytes(self._line.receive().packets[0].frames[0]).decode()}"

    def _find_next(self) -> None:
        times = [self._own_next, *(packet.time for packet in self._answers)]
        if self._arriving:
            first_byte, _, packet = self._arriving[0]
            times.append(max(first_byte, self._in.free_at) + self._link.seconds(packet.num_bytes + _HEADER_BYTES))
        self.next_at = min(times)


class Coordinator:
    """The event loop: runs the process with the earliest time next."""

    def __init__(
        self,
        members: Sequence[Member],
        link: Link,
        serve: Callable[[Packet], Iterator[Packet]],
        note: Callable[[Packet], None],
        look: Callable[[float], None],
        trace: Trace | None = None,
    ) -> None:
        """`serve`: returns the answers that a request to the coordinator completes. `note`: receives the packets in
        which workers report their steps. `look`: called with the time before every turn. `trace`: receives all
        packets."""
        self.members, self._link, self._serve, self._note, self._look = members, link, serve, note, look
        self._trace = trace
        self._checked = 0.0  # when workers were last found to make progress
        self._busy_then = 0.0
        self.now = 0.0

    def run(self) -> None:
        """Run until all processes have ended. Raises ProcessFailed if one fails, FleetError for a deadlock."""
        live = list(self.members)
        for member in live:
            self._asking(member, member.meet)
        while live:
            member = min(live, key=lambda one: one.next_at)
            others = min((one.next_at for one in live if one is not member), default=NEVER)
            self.now = max(self.now, member.next_at) if member.next_at < NEVER else self.now
            self._look(self.now)
            if self.now - self._checked > _STUCK_SECONDS or member.next_at == NEVER:
                self._look_for_deadlock(live, member.next_at == NEVER)
            self._take_turn(member, others + self._link.latency)
            if member.ended:
                live.remove(member)

    def _take_turn(self, member: Member, until: float) -> None:
        turn = self._asking(member, lambda: member.run(until))
        for packet in turn.packets:
            self._route(member, packet)
        if member.ended and member.code:
            raise ProcessFailed(member.part, f"{member.part.name} ended with exit status {member.code}")

    @staticmethod
    def _asking(member: Member, ask: Callable[[], Result]) -> Result:
        try:
            return ask()
        except LineClosed:
            raise ProcessFailed(member.part, f"{member.part.name} was killed") from None

    def _route(self, sender: Member, packet: Packet) -> None:
        to = packet.to[0]
        if to == STEPS:
            self._note(packet)
        elif to == COORDINATOR:
            if self._trace is not None and not packet.to[1]:
                self._trace.note_meeting(packet)
            for answer in self._serve(packet):
                self.members[answer.to[0]].answer(answer)
        elif not self.members[to].ended:
            if self._trace is not None:
                self._trace.note(packet)
            self.members[to].expect(packet, sender.leave_port(packet))

    def _look_for_deadlock(self, live: Sequence[Member], is_certain: bool) -> None:
        """Raise FleetError for a deadlock. Servers still tick and workers still send heartbeats then, but no worker
        trains."""
        workers = [member for member in live if member.part.role == "worker"]
        busy = sum(member.busy for member in workers)
        idle = busy - self._busy_then < _IDLE_SHARE * max(1, len(workers)) * (self.now - self._checked)
        if is_certain or (idle and workers and all(member.is_stuck for member in workers)):
            waits = "\n".join(member.describe() for member in live)
            raise FleetError(
                f"deadlock at {self.now:.3f} s of virtual time: every process waits, and none of them can "
                f"go on.\n{waits}"
            )
        if not workers and idle:
            names = ", ".join(member.part.name for member in live)
            raise FleetError(f"all workers have ended, but {names} not: does the script call fleet.stop_worker()?")
        self._checked, self._busy_then = self.now, busy
