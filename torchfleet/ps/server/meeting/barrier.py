"""Barriers: a worker waits until all other workers that have not left have arrived, or until its time-out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from torchfleet.base.errors import BarrierError, FleetError, WorkerMissing
from torchfleet.ps.net.packed import pack_request, unpack_request
from torchfleet.ps.net.request import Request
from torchfleet.ps.server.meeting.members import Members

MAX_NAMES = 1024
MAX_NAMED = 20
NONE_LOST: Mapping[int, str] = MappingProxyType({})


@dataclass(slots=True)
class Meeting:
    """One barrier with waiting workers."""

    num_workers: int
    deadline: float
    timeout: float
    waiting: dict[int, Request]
    first: int = 0  # the lowest worker number that takes part

    @property
    def expected(self) -> range:
        return range(self.first, self.first + self.num_workers)

    @property
    def described(self) -> str:
        """The number of workers, or their range, for a message."""
        return f"{self.expected[0]} to {self.expected[-1]}" if self.first else str(self.num_workers)


class Barriers:
    """All barriers of a server, by name. A name can be used again once its barrier has opened."""

    def __init__(self, members: Members | None = None) -> None:
        """`members`: knows which workers the barriers do not wait for."""
        self._meetings: dict[str, Meeting] = {}
        self._members = members or Members()

    def arrive(
        self, name: str, request: Request, num_workers: int, timeout: float, now: float, first: int = 0
    ) -> list[Request]:
        """A worker arrives. Returns the requests to answer: all of this barrier if it opens, else none.

        A repeat replaces the first copy. The barrier is for `num_workers` workers, numbered from `first` on.
        """
        asked = Meeting(num_workers, now + timeout, timeout, {}, first)
        meeting = self._meetings.get(name) or asked
        if request.message.worker not in asked.expected or asked.expected != meeting.expected:
            who = f"numbers {meeting.described}" if first else f"{meeting.num_workers} workers numbered from 0"
            raise BarrierError(
                f"barrier '{name}' is for {who}; worker {request.message.worker} came for one of {asked.described}. "
                "All workers must be started with one number."
            )
        if name not in self._meetings and len(self._meetings) >= MAX_NAMES:
            raise BarrierError(f"more than {MAX_NAMES} barriers are waiting")
        self._members.come(request.message.worker)
        self._meetings[name] = meeting
        meeting.waiting[request.message.worker] = request
        return self._open(name)

    def leave(self, worker: int) -> list[Request]:
        """Stop waiting for the worker. Returns the requests of the barriers that open."""
        return [request for _, going in self.leave_by_name(worker) for request in going]

    def leave_by_name(self, worker: int) -> list[tuple[str, list[Request]]]:
        self._members.absent.add(worker)
        return [(name, going) for name in list(self._meetings) if (going := self._open(name))]

    def forget(self, worker: int) -> None:
        """The worker's previous process has ended. No barrier counts it as arrived."""
        for name, meeting in list(self._meetings.items()):
            if meeting.waiting.pop(worker, None) is not None and not meeting.waiting:
                del self._meetings[name]

    def expired(self, now: float, lost: Mapping[int, str] = NONE_LOST) -> list[tuple[Request, FleetError]]:
        """The requests of barriers that have timed out or that wait for a worker in `lost`, each with its error."""
        return [(request, error) for _, request, error in self.expired_by_name(now, lost)]

    def expired_by_name(self, now: float, lost: Mapping[int, str]) -> list[tuple[str, Request, FleetError]]:
        given_up = []
        for name, meeting in list(self._meetings.items()):
            gone = [text for worker, text in lost.items() if self._is_missing(meeting, worker)]
            if gone:
                error: FleetError = WorkerMissing(f"barrier '{name}': {'; '.join(gone)}. Look at its log.")
            elif now >= meeting.deadline:
                error = BarrierError(
                    f"barrier '{name}': after {meeting.timeout:g} s still waiting for worker {self._missing(meeting)} "
                    f"of {meeting.described}. Look at their logs; if they are only slow, give a longer timeout."
                )
            else:
                continue
            given_up += [(name, request, error) for request in meeting.waiting.values()]
            del self._meetings[name]
        return given_up

    def waiting(self) -> Iterator[tuple[str, int]]:
        """(barrier, worker) of all waiting workers."""
        return ((name, worker) for name, meeting in self._meetings.items() for worker in meeting.waiting)

    def end_all(self, error: FleetError) -> list[tuple[Request, FleetError]]:
        """End all waits. Returns the waiting requests, each with `error`."""
        return [(request, error) for _, request, error in self.end_all_by_name(error)]

    def end_all_by_name(self, error: FleetError) -> list[tuple[str, Request, FleetError]]:
        meetings, self._meetings = self._meetings, {}
        return [(name, request, error) for name, meeting in meetings.items() for request in meeting.waiting.values()]

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        meetings = {
            name: [m.num_workers, m.deadline, m.timeout, m.first, {w: pack_request(r) for w, r in m.waiting.items()}]
            for name, m in self._meetings.items()
        }
        return {"meetings": meetings}

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
        self._meetings = {
            name: Meeting(num, deadline, timeout, {w: unpack_request(r) for w, r in waiting.items()}, first)
            for name, (num, deadline, timeout, first, waiting) in kept["meetings"].items()
        }

    def _open(self, name: str) -> list[Request]:
        meeting = self._meetings[name]
        if self._num_there(meeting) < meeting.num_workers:
            return []
        del self._meetings[name]
        return list(meeting.waiting.values())

    def _num_there(self, meeting: Meeting) -> int:
        absent = self._members.absent
        gone = sum(worker in meeting.expected and worker not in meeting.waiting for worker in absent)
        return len(meeting.waiting) + gone

    def _is_missing(self, meeting: Meeting, worker: int) -> bool:
        return worker in meeting.expected and worker not in self._members.absent and worker not in meeting.waiting

    def _missing(self, meeting: Meeting) -> str:
        """The numbers of the missing workers, for a message; only the first few."""
        absent = (worker for worker in meeting.expected if self._is_missing(meeting, worker))
        named = [str(worker) for worker in islice(absent, MAX_NAMED)]
        more = meeting.num_workers - self._num_there(meeting) - len(named)
        return ", ".join(named) + (f" and {more:,} more" if more else "")
