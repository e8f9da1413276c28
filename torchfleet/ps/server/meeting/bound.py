"""How far workers may get ahead of each other: whose push has to wait, so that no other worker's becomes too old."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchfleet.base.errors import WireError
from torchfleet.ps.net.packed import pack_request, unpack_request
from torchfleet.ps.net.request import Request


class Bound:
    """Pushes that wait, and for each worker that computes, how many pushes had been applied when it got its values.

    No push may be applied after more than `limit` others since its worker got its values. The workers that compute,
    the one with the oldest values first, are places in a queue: if all of them pushed in this order, the one at place j
    would come after j others. A push is applied if this still leaves everyone within the limit. That of the oldest
    always does, as long as there are at most limit + 1 workers: so nobody waits in a circle.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._num_applied = 0
        self._taken: dict[int, int] = {}  # by worker that computes: pushes that had been applied by then
        self._waiting: dict[int, Request] = {}  # by worker

    def begin(self, worker: int) -> None:
        """The worker gets values to compute with. If it has some, this is a repeat, and the first answer may stand."""
        self._taken.setdefault(worker, self._num_applied)

    def release(self, worker: int) -> bool:
        """The worker computes nothing now: nobody waits for it. Returns whether it did."""
        return self._taken.pop(worker, None) is not None

    def leave(self, worker: int) -> Request | None:
        """The worker is gone. Returns its push, if that still waits: it is not going to be applied."""
        self.release(worker)
        return self._waiting.pop(worker, None)

    def arrive(self, request: Request, limit: int) -> None:
        """A push is here, to be applied when `ready` says so. A repeat takes the place of the first."""
        if self._taken and self.limit not in (0, limit):
            raise WireError(f"max_staleness is {self.limit} for other workers, and {limit} for this one: use one value")
        message = request.message
        before = self._waiting.get(message.worker)
        if before is not None:
            if (before.message.client, before.message.sequence) != (message.client, message.sequence):
                raise WireError(
                    f"worker {message.worker} pushed again while its push waits: one thread of it may train"
                )
            request.arrived = before.arrived  # a repeat has waited as long as the first
        self.limit = limit
        self._waiting[message.worker] = request

    def ready(self) -> Iterator[Request]:
        """Pushes that may be applied now, oldest values first; each is to be applied, and noted, before the next."""
        while (worker := self._next()) is not None:
            yield self._waiting.pop(worker)

    def applied(self, worker: int) -> None:
        """The worker's push has been applied, and it gets the values after it."""
        self._num_applied += 1
        self._taken[worker] = self._num_applied

    def waiting(self) -> list[Request]:
        return list(self._waiting.values())

    def end_waits(self) -> list[Request]:
        """Nobody waits any longer. Returns the pushes of those who did."""
        ended, self._waiting = self.waiting(), {}
        for request in ended:
            self.release(request.message.worker)
        return ended

    def slow(self) -> list[int]:
        """The workers that others wait for, the one with the oldest values first."""
        return sorted(set(self._taken) - set(self._waiting), key=lambda worker: self._taken[worker])

    def export(self) -> dict[str, Any]:
        """All of it as plain values."""
        waiting = {worker: pack_request(request) for worker, request in self._waiting.items()}
        return {"limit": self.limit, "applied": self._num_applied, "taken": self._taken, "waiting": waiting}

    def restore(self, kept: dict[str, Any]) -> None:
        """What `export` gave."""
        self.limit, self._num_applied, self._taken = kept["limit"], kept["applied"], dict(kept["taken"])
        self._waiting = {worker: unpack_request(request) for worker, request in kept["waiting"].items()}

    def _next(self) -> int | None:
        if not self._waiting:
            return None
        by_age = sorted(self._waiting, key=lambda worker: self._taken.get(worker, self._num_applied))
        return next((worker for worker in by_age if self._may_go(worker)), None)

    def _may_go(self, worker: int) -> bool:
        others = sorted(taken for other, taken in self._taken.items() if other != worker)
        return all(self._num_applied + 1 + place - taken <= self.limit for place, taken in enumerate(others))
