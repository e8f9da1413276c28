"""The traffic of a step between workers and servers: sizes of requests and replies, and service times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchfleet.launch.simulate.packets import Packet
from torchfleet.ps.net.wire import Command, call_of

_COMMAND_BYTE = 5  # of a header: docs/protocol.md
_SMALL = 1024  # bytes: a smaller request with its reply carries no rows


@dataclass(slots=True)
class Served:
    """A request that was answered."""

    time: float
    command: int
    sent: int  # bytes of the request
    received: int  # bytes of the reply
    seconds: float  # service time


@dataclass(frozen=True)
class Exchange:
    """The requests of one command in a step, summed over the servers, and the cost of one request."""

    per_step: float  # requests to all servers per step
    sent: float  # bytes, to all servers
    received: float
    seconds: float  # of all servers
    num_servers: int

    def service(self, num_servers: int, fixed: float) -> float:
        """Return the service time of one of `num_servers` for its share of a request. `fixed`: the part that does not
        depend on the share."""
        share = max(0.0, self.seconds / self.num_servers - fixed) * self.num_servers / num_servers
        return fixed + share


class Trace:
    """Records requests and replies as they pass the coordinator."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._open: dict[tuple[tuple[int, int], int, int], Packet] = {}  # by client, server and call
        self._free_at = [0.0] * num_servers
        self.served: list[Served] = []
        self.reduced: list[tuple[float, int]] = []  # (time, bytes that a rank sent to an all-reduce)

    def note(self, packet: Packet) -> None:
        """Record a packet. When a request is answered, its `time` is its arrival time."""
        call = call_of(packet.frames)
        if packet.to[0] < self._num_servers:
            self._open[packet.sender, packet.to[0], call] = packet
            return
        server = packet.sender[0]
        request = self._open.pop((packet.to, server, call), None)
        if request is not None:
            begun = max(request.time, self._free_at[server])
            self._free_at[server] = packet.time
            command = request.frames[0][_COMMAND_BYTE]
            seconds = max(0.0, packet.time - begun)
            self.served.append(Served(packet.time, command, request.num_bytes, packet.num_bytes, seconds))

    def note_meeting(self, packet: Packet) -> None:
        """Record the tensors that a rank sends to a collective operation."""
        self.reduced.append((packet.time, sum(packet.sizes[1:])))

    def exchange(self, commands: Sequence[Command], start: float, end: float, num_steps: int) -> Exchange:
        """Summarize the requests of these commands from `start` to `end`, in which the workers made `num_steps`
        steps."""
        found = [one for one in self.served if start <= one.time <= end and one.command in commands]
        rounds = len(found) / self._num_servers
        most = max(rounds, 1e-9)
        return Exchange(
            rounds / num_steps,
            sum(one.sent for one in found) / most,
            sum(one.received for one in found) / most,
            sum(one.seconds for one in found) / most,
            self._num_servers,
        )

    def fixed_seconds(self) -> float:
        """Return the service time of a request without rows."""
        small = sorted(one.seconds for one in self.served if one.sent + one.received < _SMALL)
        return small[len(small) // 2] if small else 0.0

    def reduced_bytes(self, start: float, end: float, num_steps: int) -> float:
        """Return the bytes that a worker all-reduces in a step."""
        return sum(num for time, num in self.reduced if start <= time <= end) / num_steps
