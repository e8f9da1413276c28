"""Rounds with a quorum: each is made when k workers have given their gradients of the network for it.

Server 0 decides which gradients a round uses, when it has the first bucket of k workers. The workers ask the other
servers for the mean of these gradients (kept_parts.py). Later gradients are used in the next round, in addition to its
own k, or dropped if they were computed for a round too long ago. A worker that is late by less than a round gets the
mean that it missed, and goes on with the others. A worker that is later is taken out, and enters again (entrance.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torchfleet.base.errors import FleetError
from torchfleet.ps.net.packed import pack_answer, pack_request, unpack_answer, unpack_request
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Array, pack
from torchfleet.ps.server.meeting.kept_parts import KeptParts, Part, samples_of
from torchfleet.ps.server.meeting.rounds import ExchangeBody

ON_TIME, LATE, DROPPED = "on_time", "late", "dropped"


@dataclass
class Counts:
    """Numbers of gradients of the network, and of the samples behind them: on time, late, and dropped."""

    gradients: dict[str, int]
    samples: dict[str, float]

    @classmethod
    def none(cls) -> Counts:
        return cls(dict.fromkeys((ON_TIME, LATE, DROPPED), 0), dict.fromkeys((ON_TIME, LATE, DROPPED), 0.0))

    def add(self, what: str, samples: float | None, sign: int = 1) -> None:
        self.gradients[what] += sign
        self.samples[what] += sign * (samples or 0.0)


class Quorum:
    """The rounds of a job with a quorum. A server that does not decide uses only `buckets`, `least` and `max_age`."""

    def __init__(self) -> None:
        self.buckets: dict[int, KeptParts] = {}
        self.least, self.max_age = 0, 0
        self.number = 0  # of the open round
        self.waiting: dict[int, Request] = {}  # by worker that gave its gradients for the open round
        self.late: list[Part] = []  # gradients for earlier rounds that the open one will use
        self._given: dict[int, int] = {}  # by worker that takes part: the last round that it has given gradients for
        self._answers: dict[int, tuple[int, list[Array]]] = {}  # by worker that was late: round and answer
        self._told: dict[str, Any] = {}  # what the last answer said beside the mean
        self._taken_out: set[Part] = set()  # parts of the last round that other servers lack: no worker uses them
        self.counts = Counts.none()

    @property
    def is_on(self) -> bool:
        return bool(self.buckets)

    def keep(self, body: ExchangeBody, request: Request) -> None:
        """Keep gradients until a round uses them."""
        self.least, self.max_age = body.quorum, body.max_age
        self.buckets.setdefault(body.bucket, KeptParts()).keep((request.message.worker, body.round), request)

    def check(self, body: ExchangeBody, request: Request) -> None:
        """Raise FleetError if the gradients must be refused. Changes nothing."""
        worker = request.message.worker
        if body.bucket in self.buckets:
            self.buckets[body.bucket].check((worker, body.round), request)
        if body.decides and body.round < self.number and self._given.get(worker, -1) > body.round:
            raise FleetError(f"round {body.round} is over, and worker {worker} has given gradients for a later one")

    def arrive(self, body: ExchangeBody, request: Request, members: set[int]) -> list[Array] | None:
        """A worker gives the first bucket to the server that decides. Returns the answer to a late or repeated part;
        else None: the worker waits.

        `members`: the workers that take part. A late worker is removed if it must enter again, or has no further batch.
        """
        worker, number = request.message.worker, body.round
        known = self._known(worker, number)
        if known is not None:
            return known
        if number < self.number and self._given.get(worker, -1) == number:
            members.discard(worker)  # its answer was lost, and the others are a round ahead: it enters again
            return [pack({"parts": [], "is_over": True})]
        if number > self.number:
            self._begin(number)
        self._given[worker] = number
        if number == self.number:
            if worker in self.waiting:  # the time-out of a repeat counts from the first copy
                request.arrived = self.waiting[worker].arrived
            self.keep(body, request)
            self.waiting[worker] = request
            return None
        return self._late_answer(body, request, members)

    def _known(self, worker: int, number: int) -> list[Array] | None:
        """The answer that was given before; None if the request does not repeat an answered one."""
        last = self.buckets[0].made if 0 in self.buckets else None
        if last is not None and (worker, number) in last.given and number == last.number:
            return last.answer
        before = self._answers.get(worker)
        return before[1] if before is not None and before[0] == number else None

    def _late_answer(self, body: ExchangeBody, request: Request, members: set[int]) -> list[Array]:
        worker, number = request.message.worker, body.round
        is_dropped = self.number - number > body.max_age
        if is_dropped:
            self.counts.add(DROPPED, body.samples)
        else:
            self.keep(body, request)
            if (worker, number) in self.buckets[0].given:
                self.late.append((worker, number))
        last = self.buckets[0].made if 0 in self.buckets else None
        told: dict[str, Any] = {"is_late": True, "is_dropped": is_dropped}
        if last is None or last.number != number or worker not in members:
            members.discard(worker)
            answer = [pack({"parts": [], **told, "is_over": True})]
        else:  # it missed one round, and gets its mean
            if body.is_last:
                members.discard(worker)
            leaver = {} if members else {"leaver": worker}
            answer = [pack({"parts": list(last.given), **self._told, **told, **leaver}), last.answer[1]]
        self._answers[worker] = number, answer
        return answer

    def is_due(self, members: Collection[int]) -> bool:
        """Whether the open round can be made. `members`: the workers that take part and are present."""
        return bool(self.waiting) and len(self.waiting) >= min(self.least, len({*members, *self.waiting}))

    def behind(self, members: Collection[int]) -> set[int]:
        """The workers of `members` that are late for the open round, and were not late for the round before it."""
        earlier = self.number - 1
        late = [worker for worker in members if worker not in self.waiting]
        return {worker for worker in late if self._given.setdefault(worker, earlier) >= earlier}

    def make(self, told: dict[str, Any], entering: Collection[int]) -> list[tuple[Request, list[Array]]]:
        """Make the open round. Returns the requests of its workers with their answer. `entering`: the workers that take
        part from the next round on."""
        self._drop_old()
        parts = [
            *sorted(self.late, key=lambda part: (part[1], part[0])),
            *((w, self.number) for w in sorted(self.waiting)),
        ]
        bucket = self.buckets[0]
        given = [(part[0], bucket.given[part].message.incarnation) for part in parts]
        self._told, self._taken_out = {**told, "processes": dict(given)}, set()
        answer = bucket.make(self.number, parts, self._told, self.max_age)
        assert bucket.made is not None
        for part, request in bucket.made.given.items():
            self.counts.add(ON_TIME if part[1] == self.number else LATE, samples_of(request))
        answered = [(request, answer) for request in self.waiting.values()]
        self._given |= dict.fromkeys(entering, self.number)
        self.number, self.waiting, self.late = self.number + 1, {}, []
        return answered

    def take_out(self, number: int, parts: Collection[Part]) -> None:
        """Count the gradients of round `number` that are not in `parts` as dropped. Their workers were lost, other
        servers lack them, and so no worker uses them."""
        made = self.buckets[0].made if 0 in self.buckets else None
        if made is None or made.number != number:
            return
        for part in set(made.given) - set(parts) - self._taken_out:
            self._taken_out.add(part)
            samples = samples_of(made.given[part])
            self.counts.add(ON_TIME if part[1] == number else LATE, samples, -1)
            self.counts.add(DROPPED, samples)

    def forget(self, worker: int) -> None:
        """The worker's process was replaced: drop its gradients that no round has used."""
        if not self.is_on:
            return
        self._given.pop(worker, None)
        self._answers.pop(worker, None)
        decided = [*self.late, *((each, self.number) for each in self.waiting)]
        self._drop([part for part in decided if part[0] == worker])
        for bucket in self.buckets.values():
            bucket.forget(worker)

    def stats(self) -> dict[str, Any]:
        """Counts of the gradients so far. `waiting`: late gradients that the open round will use."""
        waiting = [samples_of(self.buckets[0].given[part]) or 0.0 for part in self.late]
        gradients = {**self.counts.gradients, "waiting": len(waiting)}
        return {
            "quorum": self.least,
            "gradients": gradients,
            "samples": {**self.counts.samples, "waiting": sum(waiting)},
        }

    def requests(self) -> Iterator[Request]:
        """All requests that wait."""
        yield from self.waiting.values()
        for bucket in self.buckets.values():
            yield from bucket.waiting()

    def end_all(self) -> list[Request]:
        """End all waits. Returns the requests that waited."""
        ended, self.waiting = list(self.requests()), {}
        for bucket in self.buckets.values():
            bucket.asked = None
        return ended

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "buckets": {number: bucket.export() for number, bucket in self.buckets.items()},
            "rounds": [self.least, self.max_age, self.number],
            "late": self.late, "given": self._given, "told": self._told, "taken_out": sorted(self._taken_out),
            "waiting": {worker: pack_request(request) for worker, request in self.waiting.items()},
            "answers": {worker: [number, pack_answer(answer)] for worker, (number, answer) in self._answers.items()},
            "counts": [self.counts.gradients, self.counts.samples],
        }  # fmt: skip

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
        self.buckets = {number: KeptParts.restored(bucket) for number, bucket in kept["buckets"].items()}
        self.least, self.max_age, self.number = kept["rounds"]
        self._given, self._told = dict(kept["given"]), dict(kept["told"])
        self._taken_out = {(worker, number) for worker, number in kept["taken_out"]}
        self.late = [(worker, number) for worker, number in kept["late"]]
        self.waiting = {worker: unpack_request(request) for worker, request in kept["waiting"].items()}
        answers = {worker: (number, unpack_answer(packed)) for worker, (number, packed) in kept["answers"].items()}
        self._answers = {w: (number, found) for w, (number, found) in answers.items() if isinstance(found, list)}
        self.counts = Counts(dict(kept["counts"][0]), dict(kept["counts"][1]))

    def _begin(self, number: int) -> None:
        """Open round `number`, with which workers begin together. Those that waited in an older round are gone."""
        self._drop([(worker, self.number) for worker in self.waiting])
        self.number = number
        self._given = dict.fromkeys(self._given, number - 1)  # a worker late for this round is late by one
        self._drop_old()

    def _drop_old(self) -> None:
        self._drop([part for part in self.late if self.number - part[1] > self.max_age])

    def _drop(self, parts: Collection[Part]) -> None:
        """Drop gradients that the open round was to use."""
        for worker, number in parts:
            self.counts.add(DROPPED, samples_of(self.buckets[0].given.pop((worker, number))))
            if number == self.number:
                del self.waiting[worker]
        self.late = [part for part in self.late if part not in parts]
