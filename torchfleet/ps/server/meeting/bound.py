"""Bounded staleness: decides which pushes wait, so that no other worker's staleness exceeds the limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchfleet.base.errors import WireError
from torchfleet.ps.net.packed import pack_request, unpack_request
from torchfleet.ps.net.request import Request


class Bound:
    """The waiting pushes, and for each computing worker the number of pushes applied before it got its values.

    The staleness of a push is the number of pushes applied since its worker got its values. It must not exceed `limit`.
    Order the computing workers by the age of their values, the oldest first: if all pushed in this order, the push at
    place j would come after j others. A push is applied if every worker then still stays within the limit. The push of
    the worker with the oldest values always qualifies if there are at most limit + 1 workers, so there is no deadlock.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._num_applied = 0
        self._taken: dict[int, int] = {}  # by computing worker: pushes applied before it got its values
        self._waiting: dict[int, Request] = {}  # by worker

    def begin(self, worker: int) -> None:
        """The worker gets values to compute with. If it already has some, this is a repeat and changes nothing."""
        self._taken.setdefault(worker, self._num_applied)

    def release(self, worker: int) -> bool:
        """The worker computes nothing now, so no push waits for it. Returns whether it was computing."""
        return self._taken.pop(worker, None) is not None

    def leave(self, worker: int) -> Request | None:
        """The worker is gone. Returns its waiting push, if any, which will not be applied."""
        self.release(worker)
        return self._waiting.pop(worker, None)

    def arrive(self, request: Request, limit: int) -> None:
        """Keep a push until `ready` yields it. A repeat replaces the first copy. Raises WireError if `limit` differs
        from the other workers', or if another push of this worker waits."""
        if self._taken and self.limit not in (0, limit):
            raise WireError(f"max_staleness is {self.limit} for other workers, and {limit} for this one: use one value")
        message = request.message
        before = self._waiting.get(message.worker)
        if before is not None:
            if (before.message.client, before.message.sequence) != (message.client, message.sequence):
                raise WireError(
                    f"worker {message.worker} pushed again while its push waits: one thread of it may train"
                )
            request.arrived = before.arrived  # the time-out of a repeat counts from the first copy
        self.limit = limit
        self._waiting[message.worker] = request

    def ready(self) -> Iterator[Request]:
        """Yield the pushes that may be applied now, oldest values first. The caller applies each, and calls `applied`,
        before it asks for the next."""
        while (worker := self._next()) is not None:
            yield self._waiting.pop(worker)

    def applied(self, worker: int) -> None:
        """The worker's push has been applied, and the worker gets the new values."""
        self._num_applied += 1
        self._taken[worker] = self._num_applied

    def waiting(self) -> list[Request]:
        return list(self._waiting.values())

    def end_waits(self) -> list[Request]:
        """End all waits. Returns the pushes that waited."""
        ended, self._waiting = self.waiting(), {}
        for request in ended:
            self.release(request.message.worker)
        return ended

    def slow(self) -> list[int]:
        """The workers that other pushes wait for, oldest values first."""
        return sorted(set(self._taken) - set(self._waiting), key=lambda worker: self._taken[worker])

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        waiting = {worker: pack_request(request) for worker, request in self._waiting.items()}
        return {"limit": self.limit, "applied": self._num_applied, "taken": self._taken, "waiting": waiting}

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
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
