"""The entrance to rounds: which workers take part in the next one, and which of them have the newest network.

Server 0 keeps it. A worker enters when it begins to train, or comes back after its batches had ended. If other workers
take part in rounds, it waits for the end of their round, and one of them sends it the network. Otherwise the workers at
the entrance begin together: with the copy of the network that the last workers left here when their batches had ended,
else with the network of a worker that made the last round, or with the servers' copy if no such worker is left.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torchfleet.ps.net.packed import (
    pack_answer,
    pack_arrays,
    pack_request,
    unpack_answer,
    unpack_arrays,
    unpack_request,
)
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Array, pack


class Entrance:
    """The workers that wait to take part, those that take part, and those that made the last round."""

    def __init__(self) -> None:
        self.waiting: dict[int, Request] = {}
        self.members: set[int] = set()  # of the next round
        self.holders: set[int] = set()  # have the newest network
        self.left: list[Array] = []  # the newest network, if the last workers have left it here
        self.left_after = 0  # the round after which they did
        self._hold: object = None  # charges its bytes to the sender's budget
        self._numbers: dict[int, tuple[int, int]] = {}  # by waiting worker: its process, and the number of the request
        self._answers: dict[int, tuple[int, int, list[Array]]] = {}  # by worker: the last answer, for a repeat

    def arrive(self, number: int, request: Request) -> list[Array] | None:
        """A worker enters. Returns the answer to a repeat whose reply was lost; else None: the worker waits."""
        worker, process = request.message.worker, request.message.incarnation
        before = self._answers.get(worker)
        if before is not None and before[:2] == (process, number):
            return before[2]
        self.members.discard(worker)
        self.waiting[worker], self._numbers[worker] = request, (process, number)
        return None

    def leave_copy(self, number: int, copy: list[Array], hold: object) -> None:
        """Keep the network as it is after round `number`, the last one so far. A late or repeated copy is ignored."""
        if number > self.left_after and not self.members:
            self.left, self.left_after, self._hold = copy, number, hold

    def admit(
        self,
        made: Collection[int],
        ended: Collection[int],
        behind: Collection[int] = (),
        holders: Collection[int] | None = None,
    ) -> list[int]:
        """Note that the workers `made` have made a round. Of these, `ended` leave; late workers `behind` will get its
        mean, and stay. `holders`: those that step the network by its mean; None: all. Returns the workers that enter
        now.

        No worker enters if all of `made` leave, because they could not send it the network.
        """
        staying = set(made) - set(ended)
        entering = sorted(self.waiting) if staying else []
        self.holders, self.members = set(made if holders is None else holders), {*staying, *behind, *entering}
        self.left, self._hold = [], None  # an older network
        return entering

    def begin(self) -> tuple[list[int], list[int]]:
        """Let the waiting workers begin together. Returns them, and those of them that have the newest network. If the
        second list is empty, all take the copy that was left here, or the servers' copy."""
        founders = sorted(self.waiting)
        holders = [] if self.left else sorted(self.holders.intersection(founders))
        self.members, self.holders = set(founders), set(holders or founders)
        return founders, holders

    def answer(self, workers: Collection[int], told: dict[str, Any]) -> list[tuple[Request, list[Array]]]:
        """End the waits of these workers. Returns their requests with the reply: `told`, and the copy left here."""
        reply = [pack(told), *self.left]
        for worker in workers:
            self._answers[worker] = (*self._numbers.pop(worker), reply)
        return [(self.waiting.pop(worker), reply) for worker in workers]

    def forget(self, worker: int) -> None:
        """The worker's process was replaced, and the network that it had is gone."""
        self.waiting.pop(worker, None)
        self._numbers.pop(worker, None)
        self.members.discard(worker)
        self.holders.discard(worker)

    def end_all(self) -> list[Request]:
        """End all waits. Returns the requests that waited."""
        ended, self.waiting, self._numbers = list(self.waiting.values()), {}, {}
        return ended

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "waiting": {worker: pack_request(request) for worker, request in self.waiting.items()},
            "members": sorted(self.members),
            "holders": sorted(self.holders),
            "left": [self.left_after, pack_arrays(self.left)],
            "numbers": self._numbers,
            "answers": {w: [process, n, pack_answer(answer)] for w, (process, n, answer) in self._answers.items()},
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
        self.waiting = {worker: unpack_request(request) for worker, request in kept["waiting"].items()}
        self.members, self.holders = set(kept["members"]), set(kept["holders"])
        self.left_after, self.left = kept["left"][0], unpack_arrays(kept["left"][1])
        self._numbers = {worker: (process, number) for worker, (process, number) in kept["numbers"].items()}
        answers = {worker: (process, n, unpack_answer(a)) for worker, (process, n, a) in kept["answers"].items()}
        self._answers = {w: (process, n, a) for w, (process, n, a) in answers.items() if isinstance(a, list)}
