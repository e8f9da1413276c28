"""Gradients that workers have given to rounds with a quorum, by bucket, and the means that were made of them.

One server decides which gradients a round uses (quorum.py). All other servers keep the gradients that arrive, until a
worker asks for the mean of some of them. A Part names gradients by their worker and the round they were computed for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.net.packed import pack_answer, pack_request, unpack_answer, unpack_request
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_BODY, Array, pack, unpack
from torchfleet.ps.server.meeting.rounds import Answers, ExchangeBody, mean_of

Part = tuple[int, int]  # a worker, and the round that it computed its gradients for
OVER = {"is_over": True}  # the answer to a worker that asks for the mean of an earlier round than the last one


@dataclass
class MadeMean:
    """The mean of a bucket in the last round that was made."""

    number: int
    given: dict[Part, Request]  # in the order in which they are added
    answer: list[Array]


@dataclass
class Asked:
    """A mean that workers have asked for, and that cannot be made yet."""

    number: int
    parts: list[Part]
    processes: dict[int, int]  # by worker: the incarnation that gave its part
    requests: dict[int, Request] = field(default_factory=dict)  # by worker


class KeptParts:
    """The gradients of one bucket."""

    def __init__(self) -> None:
        self.given: dict[Part, Request] = {}  # not yet in a round
        self.made: MadeMean | None = None
        self.asked: Asked | None = None

    def keep(self, part: Part, request: Request) -> None:
        """Keep gradients until a round uses them. A repeat replaces the first copy; if the last round has used that,
        nothing is kept."""
        if self.made is None or part not in self.made.given:
            self.check(part, request)
            self.given[part] = request

    def check(self, part: Part, request: Request) -> None:
        """Raise TableError if the number of gradients differs from that of other workers."""
        size = request.message.arrays[1].data.shape
        other = next((given.message.arrays[1].data.shape for given in self.given.values()), size)
        if size != other:
            raise TableError(
                f"worker {part[0]} gave {size[0]:,} gradients, and others {other[0]:,} for the same part of the "
                "network: all workers must run the same model"
            )

    def ask(self, body: ExchangeBody, request: Request) -> list[Array] | None:
        """A worker asks for the mean of `body.parts` in a round. Returns None if the worker must wait for that mean."""
        number, parts = body.round, body.parts
        last = self.made.number if self.made is not None else 0
        if self.asked is not None:
            last = max(last, self.asked.number - 1)
        if number <= last:
            return self._of_last(number, parts)
        if self.asked is None or self.asked.number < number:
            overtaken, self.asked = self.asked, Asked(number, parts, body.processes)
            if overtaken is not None:
                self.asked.requests.update(overtaken.requests)  # they will get the answer OVER
        self.asked.requests[request.message.worker] = request
        return None

    def _of_last(self, number: int, parts: list[Part]) -> list[Array]:
        if self.made is None or number != self.made.number:
            return [pack(OVER)]
        if not set(parts) < set(self.made.given) or not parts:  # all, or also missing ones: the answer names its parts
            return self.made.answer
        return _answer(parts, {}, [self.made.given[part] for part in parts])

    def missing(self, incarnation: Callable[[int], int | None], absent: Collection[int]) -> set[int]:
        """The workers whose parts the requested mean still waits for. `incarnation`: returns that of a worker's present
        process. A part that an earlier process has not given is not waited for."""
        if self.asked is None:
            return set()
        lacking = {worker for worker, number in self.asked.parts if (worker, number) not in self.given} - set(absent)
        return {w for w in lacking if incarnation(w) in (None, self.asked.processes.get(w))}

    def make_asked(self, max_age: int) -> Answers:
        """Make the requested mean from the parts that are here. Returns the waiting requests, each with its answer."""
        asked, self.asked = self.asked, None
        assert asked is not None
        answer = self.make(asked.number, asked.parts, {}, max_age)
        answers = []
        for request in asked.requests.values():
            is_of_it = unpack(request.message.arrays[0], ExchangeBody, MAX_BODY).round == asked.number
            answers.append((request, answer if is_of_it else [pack(OVER)]))
        return answers

    def make(self, number: int, parts: list[Part], told: dict[str, Any], max_age: int) -> list[Array]:
        """Make the mean of round `number` from those of `parts` that are here. Drops gradients that are too old for the
        next round."""
        given = {part: self.given.pop(part) for part in parts if part in self.given}
        self.given = {part: request for part, request in self.given.items() if number + 1 - part[1] <= max_age}
        answer = _answer(list(given), told, list(given.values()))
        self.made = MadeMean(number, given, answer)
        return answer

    def forget(self, worker: int) -> None:
        """Drop the worker's gradients that no round has used, and its waiting request."""
        self.given = {part: request for part, request in self.given.items() if part[0] != worker}
        if self.asked is not None:
            self.asked.requests.pop(worker, None)
            if not self.asked.requests:
                self.asked = None

    def waiting(self) -> Iterator[Request]:
        return iter(self.asked.requests.values() if self.asked is not None else ())

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        made, asked = self.made, self.asked
        return {
            "given": _packed(self.given),
            "made": None if made is None else [made.number, _packed(made.given), pack_answer(made.answer)],
            "asked": None if asked is None else [asked.number, asked.parts, asked.processes, _packed(asked.requests)],
        }

    @classmethod
    def restored(cls, kept: dict[str, Any]) -> KeptParts:
        """The inverse of `export`."""
        found = cls()
        found.given = _unpacked_parts(kept["given"])
        if kept["made"] is not None:
            number, given, answer = kept["made"]
            arrays = unpack_answer(answer)
            found.made = MadeMean(number, _unpacked_parts(given), arrays if isinstance(arrays, list) else [])
        if kept["asked"] is not None:
            number, parts, processes, requests = kept["asked"]
            found.asked = Asked(number, [(worker, base) for worker, base in parts], dict(processes))
            found.asked.requests = {worker: unpack_request(request) for worker, request in requests}
        return found


def samples_of(request: Request) -> float | None:
    return unpack(request.message.arrays[0], ExchangeBody, MAX_BODY).samples


def _answer(parts: list[Part], told: dict[str, Any], requests: list[Request]) -> list[Array]:
    mean: npt.NDArray[np.float32] = np.zeros((0, 1), np.float32)
    if requests:
        mean = mean_of([(request.message.arrays[1].data, samples_of(request)) for request in requests])
    return [pack({"parts": parts, **told}), Array(0, mean)]


def _packed(requests: dict[Any, Request]) -> list[Any]:
    return [[key, pack_request(request)] for key, request in requests.items()]


def _unpacked_parts(packed: list[Any]) -> dict[Part, Request]:
    return {(part[0], part[1]): unpack_request(request) for part, request in packed}
