"""Gathers: every worker sends some bytes, waits for the others, and receives the bytes of all workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from torchfleet.base.errors import FleetError, TableError
from torchfleet.ps.net.packed import pack_answer, unpack_answer
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Array
from torchfleet.ps.server.meeting.barrier import NONE_LOST, Barriers
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.meeting.presence import MAX_NAME

MAX_BYTES = 1 << 24  # that one worker may send
MAX_KEPT, MAX_KEPT_OF_ONE = 1 << 12, 8  # clients whose last answer is kept: in all, and of one worker

Answers = list[tuple[Request, list[Array] | FleetError]]


class GatherBody(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    round: int  # numbers a client's gathers: a repeat of the last one gets the same answer
    num_workers: int
    timeout: float
    first: int = 0  # the lowest worker number that takes part


class Gatherings:
    """All gathers of a server. An open one is a barrier. Each client's last answer is kept, in case its reply was lost.

    A request of an earlier round than the client's last is a late copy; the client ignores its answer.
    """

    def __init__(self, members: Members | None = None) -> None:
        self._barriers = Barriers(members)
        self._rounds: dict[
            tuple[str, int], tuple[int, int]
        ] = {}  # client and round of waiting workers, by name and worker
        # By client: the round and its answer, the hold that charges its bytes, and the worker.
        self._kept: OrderedDict[int, tuple[int, list[Array] | FleetError, object, int]] = OrderedDict()

    def arrive(self, body: GatherBody, request: Request) -> Answers:
        """A worker arrives. Returns the requests to answer, with their replies; none while workers are missing."""
        num_bytes = request.message.arrays[1].data.nbytes
        if num_bytes > MAX_BYTES:
            raise TableError(f"gather '{body.name}': {num_bytes:,} bytes from one worker, at most {MAX_BYTES:,}")
        client = request.message.client
        kept = self._kept.get(client)
        if kept is not None and body.round <= kept[0]:
            return [(request, kept[1])] if body.round == kept[0] else []
        place = (body.name, request.message.worker)
        waits = self._rounds.get(place)
        if waits is not None and waits[0] == client and body.round < waits[1]:
            return []
        going = self._barriers.arrive(body.name, request, body.num_workers, body.timeout, request.arrived, body.first)
        self._rounds[place] = client, body.round
        return self._close(body.name, going)

    def leave(self, worker: int) -> Answers:
        """As Barriers.leave."""
        return [answer for name, going in self._barriers.leave_by_name(worker) for answer in self._close(name, going)]

    def forget(self, worker: int) -> None:
        """As Barriers.forget."""
        self._barriers.forget(worker)
        self._rounds = {place: known for place, known in self._rounds.items() if place[1] != worker}

    def expired(self, now: float, lost: Mapping[int, str] = NONE_LOST) -> list[tuple[Request, FleetError]]:
        """As Barriers.expired."""
        return self._give_up(self._barriers.expired_by_name(now, lost))

    def waiting(self) -> Iterator[tuple[str, int]]:
        """As Barriers.waiting."""
        return self._barriers.waiting()

    def end_all(self, error: FleetError) -> list[tuple[Request, FleetError]]:
        """As Barriers.end_all."""
        return self._give_up(self._barriers.end_all_by_name(error))

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "barriers": self._barriers.export(),
            "rounds": [[*place, *waits] for place, waits in self._rounds.items()],
            "kept": [[client, n, pack_answer(answer), worker] for client, (n, answer, _, worker) in self._kept.items()],
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
        self._barriers.restore(kept["barriers"])
        self._rounds = {(name, worker): (client, number) for name, worker, client, number in kept["rounds"]}
        answers = [(client, number, unpack_answer(packed), worker) for client, number, packed, worker in kept["kept"]]
        self._kept = OrderedDict((client, (n, found or [], None, worker)) for client, n, found, worker in answers)

    def _give_up(self, given_up: list[tuple[str, Request, FleetError]]) -> list[tuple[Request, FleetError]]:
        for name, request, error in given_up:
            self._keep(name, request, error)
        return [(request, error) for _, request, error in given_up]

    def _close(self, name: str, going: list[Request]) -> Answers:
        """The same reply for all workers: the number and the bytes of each worker that took part."""
        ordered = sorted(going, key=lambda request: request.message.worker)
        reply = [Array(request.message.worker, request.message.arrays[1].data) for request in ordered]
        for request in going:
            self._keep(name, request, reply)
        return [(request, reply) for request in going]

    def _keep(self, name: str, request: Request, answer: list[Array] | FleetError) -> None:
        client, number = self._rounds.pop((name, request.message.worker))
        kept = self._kept.get(client)
        if kept is None or kept[0] < number:
            self._kept[client] = number, answer, request.hold, request.message.worker
        self._kept.move_to_end(client)
        if kept is None:
            self._forget_surplus(request.message.worker)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _forget_surplus(self, worker: int) -> None:
        """A process has few clients: answers to earlier processes of the worker need not be kept."""
        own = [client for client, known in self._kept.items() if known[3] == worker]
        for client in own[:-MAX_KEPT_OF_ONE]:
            del self._kept[client]
