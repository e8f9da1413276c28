"""Rounds: in each, every worker gives its gradients of the network, and all of them get the mean.

The network is cut into buckets, and a bucket into one span per server. A server makes the mean of each of its spans by
itself, once all workers that the round counts have given their parts. If a worker is lost within a round, some means
may have its part and others not. Each reply therefore names the workers whose parts are in the mean. The workers use
only the parts that all replies have in common, and ask again for the means that have more: servers keep parts until the
next round of the bucket is made. All workers get the same replies and choose the same parts, so no server asks another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import FleetError, TableError, WireError
from torchfleet.ps.net.packed import pack_answer, pack_request, unpack_answer, unpack_request
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_BODY, Array, pack, unpack

MAX_BUCKETS = 1024
MAX_ROUND = 1 << 53
MAX_SAMPLES = 1e15  # of one part: float64 adds such numbers exactly
MAX_RATES = 1024  # learning rates in one part

Answers = list[tuple[Request, list[Array]]]


class ExchangeBody(msgspec.Struct, forbid_unknown_fields=True):
    round: int  # numbers the rounds of the job from 1 on
    bucket: int
    workers: list[int]  # that the sender counts in this round; with `again`, whose parts it asks for
    samples: float | None = None  # behind the gradients; None: not known; 0: the sender has no batch at present
    seconds: float = 0.0  # that the sender computed for this round
    is_last: bool = False  # the sender has no batch after this one
    rates: list[float] = []  # the sender's learning rates of the network
    again: bool = False  # asks for the mean of some parts of a round that is made; brings no gradients
    quorum: int = 0  # a round is made when this many workers have given theirs (quorum.py); 0: all
    max_age: int = 0  # with a quorum: rounds by which gradients may be late
    decides: bool = False  # with a quorum: this part stands for all parts that the sender gives in this round
    parts: list[tuple[int, int]] = []  # with a quorum and `again`: worker and round of the gradients asked for
    processes: dict[int, int] = {}  # by worker of `parts`: the incarnation of the process that gave them


@dataclass
class Round:
    """One round of one bucket."""

    number: int
    counted: frozenset[int]  # the workers that all senders so far count
    given: dict[int, Request] = field(default_factory=dict)
    bodies: dict[int, ExchangeBody] = field(default_factory=dict)
    answer: list[Array] | None = None  # once it is made

    @property
    def workers(self) -> list[int]:
        """The workers whose parts are here and count, in the order in which parts are added."""
        return sorted(self.counted.intersection(self.given))

    def mean(self, workers: Collection[int]) -> npt.NDArray[np.float32]:
        """The mean of these workers' parts, weighted by their samples, and summed in the order of the workers."""
        parts = [(self.given[worker].message.arrays[1].data, self.bodies[worker].samples) for worker in sorted(workers)]
        return mean_of(parts)


def mean_of(parts: list[tuple[npt.NDArray[np.float32], float | None]]) -> npt.NDArray[np.float32]:
    """Σ nᵢ·gᵢ / Σ nᵢ in float32, in the order given; the plain mean if a number is unknown, or all are the same.

    Parts of 0 samples, of workers without a batch, count for nothing.
    """
    parts = [part for part in parts if part[1] != 0] or parts
    numbers = [number for _, number in parts if number is not None]
    total: npt.NDArray[np.float32] = np.zeros_like(parts[0][0])
    if len(numbers) < len(parts) or len(set(numbers)) == 1:
        for values, _ in parts:
            total += values
        total *= np.float32(1.0 / len(parts))
        return total
    num_samples = sum(numbers)
    for (values, _), number in zip(parts, numbers, strict=True):
        total += values * np.float32(number / num_samples)
    return total


class Rounds:
    """The rounds of all buckets of one server: at most one open and one made round of each."""

    def __init__(self) -> None:
        self.open: dict[int, Round] = {}
        self._made: dict[int, Round] = {}
        self._out: dict[int, int] = {}  # by worker that was started again: no round up to this one waits for it
        self.newest = 0  # the highest number of a round that a worker has taken part in

    def arrive(self, body: ExchangeBody, request: Request) -> list[Array] | None:
        """Keep a worker's part. Returns the answer if the round is made already: this is a repeat, or comes too late.

        A repeat replaces the first copy. Raises FleetError for a round that is over.
        """
        made = self._made.get(body.bucket)
        if made is not None and body.round <= made.number:
            if body.round == made.number:
                return made.answer
            raise FleetError(f"round {body.round} is over: round {made.number} of bucket {body.bucket} is made")
        present = self.open.get(body.bucket)
        if present is None or present.number < body.round:  # the workers of an older open round are gone
            present = Round(body.round, frozenset(body.workers))
        elif present.number > body.round:
            raise FleetError(f"round {body.round} is over: round {present.number} of bucket {body.bucket} has begun")
        _check_alike(present, request)
        worker, before = request.message.worker, present.given.get(request.message.worker)
        if before is not None:
            request.arrived = before.arrived  # the time-out of a repeat counts from the first copy
        self.open[body.bucket] = present
        self.newest = max(self.newest, body.round)
        present.counted &= frozenset(body.workers)
        present.given[worker], present.bodies[worker] = request, body
        return None

    def again(self, body: ExchangeBody) -> list[Array]:
        """The mean of the parts of `body.workers` in a round that is made."""
        made = self._made.get(body.bucket)
        if made is None or made.number != body.round or not body.workers or not set(body.workers) <= set(made.workers):
            known = "no round" if made is None else f"round {made.number} with the parts of {made.workers}"
            raise WireError(f"bucket {body.bucket}: {known} is made, not round {body.round} with {body.workers}")
        return [pack({"workers": sorted(body.workers)}), Array(0, made.mean(body.workers))]

    def missing(self, bucket: int, absent: Collection[int]) -> set[int]:
        """The workers that this bucket's open round waits for."""
        present = self.open[bucket]
        out = {worker for worker, number in self._out.items() if present.number <= number}
        return {worker for worker in present.counted - out if worker not in present.given and worker not in absent}

    def make(self, bucket: int, told: dict[str, Any]) -> Answers:
        """Make the open round: returns its requests with their answer. `told`: what the answer says beside the mean."""
        made = self.open.pop(bucket)
        workers = made.workers
        made.answer = [pack({"workers": workers, **told}), Array(0, made.mean(workers))]
        self._made[bucket] = made
        return [(request, made.answer) for request in made.given.values()]

    def forget(self, worker: int) -> None:
        """The worker's process was replaced. Open rounds go on without it, and so does the next one."""
        if not self.newest:
            return
        self._out[worker] = self.newest + 1
        for bucket, present in list(self.open.items()):
            present.given.pop(worker, None)
            present.bodies.pop(worker, None)
            if not present.given:
                del self.open[bucket]

    def waiting(self) -> Iterator[Request]:
        return (request for present in self.open.values() for request in present.given.values())

    def end_all(self) -> list[Request]:
        """Drop all open rounds. Returns the requests that wait in them."""
        ended, self.open = list(self.waiting()), {}
        return ended

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "open": {bucket: _packed(present) for bucket, present in self.open.items()},
            "made": {bucket: _packed(made) for bucket, made in self._made.items()},
            "out": self._out,
            "newest": self.newest,
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
        self.open = {bucket: _unpacked(packed) for bucket, packed in kept["open"].items()}
        self._made = {bucket: _unpacked(packed) for bucket, packed in kept["made"].items()}
        self._out, self.newest = dict(kept["out"]), kept["newest"]


def _check_alike(present: Round, request: Request) -> None:
    size = request.message.arrays[1].data.shape
    other = next((given.message.arrays[1].data.shape for given in present.given.values()), size)
    if size != other:
        raise TableError(
            f"worker {request.message.worker} gave {size[0]:,} gradients, and others {other[0]:,} for the same part of "
            "the network: all workers must run the same model"
        )


def _packed(present: Round) -> list[Any]:
    given = {worker: pack_request(request) for worker, request in present.given.items()}
    return [present.number, sorted(present.counted), given, pack_answer(present.answer)]


def _unpacked(packed: list[Any]) -> Round:
    number, counted, given, answer = packed
    made = Round(number, frozenset(counted), {worker: unpack_request(request) for worker, request in given.items()})
    made.bodies = {w: unpack(r.message.arrays[0], ExchangeBody, MAX_BODY) for w, r in made.given.items()}
    found = unpack_answer(answer)
    made.answer = found if isinstance(found, list) else None
    return made
