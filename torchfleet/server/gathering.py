"""Barriers that every worker brings something to, and takes everybody's things away from."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from torchfleet.errors import BarrierError, TableError
from torchfleet.net.wire import Array
from torchfleet.server.barrier import Barriers
from torchfleet.server.request import Request

MAX_BYTES = 1 << 24  # that one worker may bring
MAX_KEPT = 1 << 12

Answers = list[tuple[Request, list[Array]]]


class GatherBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    round: int  # numbers a client's gatherings: a repeat of the last one is answered with what it was
    num_workers: int
    timeout: float


class Gatherings:
    """Open ones are barriers; of closed ones each client's last is kept, for a reply that got lost."""

    def __init__(self) -> None:
        self._barriers = Barriers()
        self._asked: dict[int, GatherBody] = {}  # by client, of those that wait
        self._kept: OrderedDict[int, tuple[int, list[Array]]] = OrderedDict()

    def arrive(self, body: GatherBody, request: Request) -> Answers:
        """The requests that may go on, with their replies: none while workers are missing."""
        num_bytes = request.message.arrays[1].data.nbytes
        if num_bytes > MAX_BYTES:
            raise TableError(f"gather '{body.name}': {num_bytes:,} bytes from one worker, at most {MAX_BYTES:,}")
        client = request.message.client
        kept = self._kept.get(client)
        if kept is not None and kept[0] == body.round:
            return [(request, kept[1])]
        going = self._barriers.arrive(body.name, request, body.num_workers, body.timeout, request.arrived)
        self._asked[client] = body
        return self._close(going)

    def leave(self, worker: int) -> Answers:
        """The worker is not waited for any more."""
        by_name: dict[str, list[Request]] = {}
        for request in self._barriers.leave(worker):
            by_name.setdefault(self._asked[request.message.client].name, []).append(request)
        return [answer for going in by_name.values() for answer in self._close(going)]

    def expired(self, now: float) -> list[tuple[Request, BarrierError]]:
        given_up = self._barriers.expired(now)
        for request, _ in given_up:
            self._asked.pop(request.message.client, None)
        return given_up

    def _close(self, going: list[Request]) -> Answers:
        """The same reply for all: per worker that took part its number and what it brought."""
        ordered = sorted(going, key=lambda request: request.message.worker)
        reply = [Array(request.message.worker, request.message.arrays[1].data) for request in ordered]
        for request in going:
            client = request.message.client
            self._kept[client] = self._asked.pop(client).round, reply
            self._kept.move_to_end(client)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return [(request, reply) for request in going]
