"""A link between two machines, measured as a worker uses it: latency, bytes each way, the other machine's clock."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from torchfleet.base.errors import FleetError, WireError
from torchfleet.observe.doctor.link_server import MAX_BYTES
from torchfleet.ps.net.addresses import connect
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.probe import mechanism_at
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import OK, Array, Command, Message, Reply, Role, decode_reply, encode, unpack

_PINGS = 200
_PING_SECONDS = 5.0  # at most for all pings: a slow link needs fewer
_SMALL, _LARGE = 1 << 17, 1 << 20  # bytes of a request, on slow links and on fast ones
_FAST = 25e6  # bytes a second, from which on a link is fast
_UNDER_WAY = 8  # requests in flight
_PATIENCE = 10.0  # seconds for one reply


class LinkFacts(msgspec.Struct):
    """The measurements of the link to `place`."""

    place: str
    is_encrypted: bool
    p50_ms: float
    p99_ms: float
    to_bytes_s: float
    from_bytes_s: float
    clock_ahead_ms: float  # of the other machine
    clock_error_ms: float  # the error bound of clock_ahead_ms
    facts: dict[str, object]  # of the other machine; empty if a training server answers


class Link:
    """A connection to a machine that runs `fleet doctor --serve`."""

    def __init__(self, place: str, key_dir: str | None) -> None:
        """`place`: HOST:PORT. Raises FleetError if nothing answers there."""
        host, _, port = place.rpartition(":")
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError as error:
            raise FleetError(
                f"{place}: {host} is not known here ({error}). Expected a name that this machine knows, or an address."
            ) from None
        mechanism = mechanism_at(host.strip("[]"), int(port))
        if not mechanism:
            found = "nothing listens there" if mechanism is None else "something else listens there"
            raise FleetError(f"{place}: {found}. On that machine run `fleet doctor --serve {place}`.")
        self.is_encrypted = mechanism == "CURVE"
        if self.is_encrypted != (key_dir is not None):
            what = "asks for keys: give --key_dir DIR" if self.is_encrypted else "has no keys: leave --key_dir out"
            raise FleetError(f"{place} {what}")
        self.place, self._number = place, 0
        self._channel: Channel = connect(f"tcp://{place}", KeyFolder(key_dir) if key_dir else None, Role.WORKER)

    def close(self) -> None:
        self._channel.close()

    def measure(self, seconds: float) -> LinkFacts:
        """Measure the link. `seconds`: how long bytes are sent each way. Raises FleetError if the other end is
        silent."""
        self._ask(Command.PING)  # waits until the connection is made
        round_trips, offset, error = self._pings()
        to = self._rate(seconds, self._push)
        back = self._rate(seconds, self._pull)
        reply = self._ask(Command.STATS)
        facts = unpack(reply.arrays[0], dict[str, object], 1 << 16) if reply.arrays else {}
        p50, p99 = (float(np.percentile(round_trips, percent)) for percent in (50, 99))
        return LinkFacts(self.place, self.is_encrypted, p50, p99, to, back, offset, error, facts)

    def _pings(self) -> tuple[list[float], float, float]:
        """Return (milliseconds of all pings, clock offset from the fastest ping, half of its time on the way)."""
        round_trips: list[float] = []
        best, deadline = (float("inf"), 0.0), time.monotonic() + _PING_SECONDS
        while len(round_trips) < _PINGS and time.monotonic() < deadline:
            sent = time.time_ns()
            reply = self._ask(Command.PING, trace=1)
            now = time.time_ns()
            round_trips.append((now - sent) / 1e6)
            way = (now - sent - (reply.answered - reply.taken)) / 1e6
            best = min(best, (way, ((reply.taken - sent) + (reply.answered - now)) / 2e6))
        return round_trips, best[1], best[0] / 2

    def _push(self, size: int) -> tuple[Command, list[Array]]:
        return Command.PUSH, [Array(0, _noise[:size])]

    def _pull(self, size: int) -> tuple[Command, list[Array]]:
        return Command.PULL, [Array(0, np.array([size], np.uint64))]

    def _rate(self, seconds: float, request: Callable[[int], tuple[Command, list[Array]]]) -> float:
        """Return bytes per second: a short run with small requests, then one with requests that suit the link."""
        rough = self._flood(min(0.3, seconds / 4), _SMALL, request)
        return self._flood(seconds, _LARGE if rough > _FAST else _SMALL, request)

    def _flood(self, seconds: float, size: int, request: Callable[[int], tuple[Command, list[Array]]]) -> float:
        """Keep several requests in flight and return the rate. It is counted from the first reply on, to exclude what
        buffers absorb."""
        command, arrays = request(size)
        for _ in range(_UNDER_WAY):
            self._send(command, arrays)
        self._receive()
        start, num, under_way = time.monotonic(), 0, _UNDER_WAY - 1
        last = start
        while under_way:
            if last - start < seconds:
                self._send(command, arrays)
                under_way += 1
            self._receive()
            num, under_way, last = num + 1, under_way - 1, time.monotonic()
        return num * size / max(last - start, 1e-9)

    def _ask(self, command: Command, arrays: Sequence[Array] = (), trace: int = 0) -> Reply:
        number = self._send(command, arrays, trace)
        reply = self._receive()
        if reply.call != number:
            raise FleetError(f"{self.place} answered another request than it was asked")
        return reply

    def _send(self, command: Command, arrays: Sequence[Array] = (), trace: int = 0) -> int:
        self._number += 1
        message = Message(command, Role.WORKER, call=self._number, arrays=list(arrays), trace=trace)
        deadline = time.monotonic() + _PATIENCE
        while not self._channel.send(encode(message)):
            if time.monotonic() > deadline:
                raise FleetError(
                    f"{self.place} has accepted no data for {_PATIENCE:g} s: does a firewall block the port?"
                )
            time.sleep(0.001)
        return self._number

    def _receive(self) -> Reply:
        frames = self._channel.receive(_PATIENCE)
        if frames is None:
            raise FleetError(f"{self.place} has not answered for {_PATIENCE:g} s: is its key known, the way open?")
        try:
            reply = decode_reply(frames)
        except WireError as error:
            raise FleetError(f"{self.place} sent a reply that cannot be decoded: {error}") from None
        if reply.status != OK:
            raise FleetError(
                f"{self.place} is no doctor's server: it refuses what is asked. Run `fleet doctor --serve` there."
            )
        return reply


_noise = np.random.default_rng(1).integers(0, 256, MAX_BYTES, np.uint8)  # random: no link compresses them
