"""Gradients that workers have given to rounds with a quorum, by bucket, and the means that were made of them.

One server decides which gradients are in a round (quorum.py). All others keep what comes until a worker asks for the
mean of those gradients. They are named by their worker and the round that it computed them for.
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
    """A mean that cannot be made yet."""

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
        """Keep gradients until a round has them. A repeat replaces the first copy, or comes too late."""
        if self.made is None or part not in self.made.given:
            self.check(part, request)
            self.given[part] = request

    def check(self, part: Part, request: Request) -> None:
        """Raise TableError if the gradients are not as many as those of other workers."""
        size = request.message.arrays[1].data.shape
        other = next((given.message.arrays[1].data.shape for given in self.given.values()), size)
        if size != other:
            raise TableError(
                f"worker {part[0]} gave {size[0]:,} gradients, and others {other[0]:,} for the same part of the "
                "network: all workers must run the same model"
            )

    def ask(self, body: ExchangeBody, request: Request) -> list[Array] | None:
        """A worker asks for the mean of `body.parts` in a round. Returns None if it waits until that is made."""
        number, parts = body.round, body.parts
        last = self.made.number if self.made is not None else 0
        if self.asked is not None:
            last = max(last, self.asked.number - 1)
        if number <= last:
            return self._of_last(number, parts)
        if self.asked is None or self.asked.number < number:
            overtaken, self.asked = self.asked, Asked(number, parts, body.processes)
            if overtaken is not None:
                self.asked.requests.update(overtaken.requests)  # they are told that their round is over
        self.asked.requests[request.message.worker] = request
        return None

    def _of_last(self, number: int, parts: list[Part]) -> list[Array]:
        if self.made is None or number != self.made.number:
            return [pack(OVER)]
        if not set(parts) < set(self.made.given) or not parts:  # all, or some that did not come: the answer names those
            return self.made.answer
        return _answer(parts, {}, [self.made.given[part] for part in parts])

    def missing(self, incarnation: Callable[[int], int | None], absent: Collection[int]) -> set[int]:
        """The workers that the mean that others ask for waits for. `incarnation`: of a worker's present process. What
        an earlier one has not given does not come anymore."""
        if self.asked is None:
            return set()
        lacking = {worker for worker, number in self.asked.parts if (worker, number) not in self.given} - set(absent)
        return {w for w in lacking if incarnation(w) in (None, self.asked.processes.get(w))}

    def make_asked(self, max_age: int) -> Answers:
        """Make the mean that workers ask for, of the parts that are here. Returns their requests with the answer."""
        asked, self.asked = self.asked, None
        assert asked is not None
        answer = self.make(asked.number, asked.parts, {}, max_age)
        answers = []
        for request in asked.requests.values():
            is_of_it = unpack(request.message.arrays[0], ExchangeBody, MAX_BODY).round == asked.number
            answers.append((request, answer if is_of_it else [pack(OVER)]))
        return answers

    def make(self, number: int, parts: list[Part], told: dict[str, Any], max_age: int) -> list[Array]:
        """Make the mean of round `number`, of those of `parts` that are here. Drops what is too old for the next."""
        given = {part: self.given.pop(part) for part in parts if part in self.given}
        self.given = {part: request for part, request in self.given.items() if number + 1 - part[1] <= max_age}
        answer = _answer(list(given), told, list(given.values()))
        self.made = MadeMean(number, given, answer)
        return answer

    def forget(self, worker: int) -> None:
        """Drop what a worker has given and no round has."""
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
