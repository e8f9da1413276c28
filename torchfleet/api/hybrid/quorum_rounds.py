"""A worker's side of rounds with a quorum: server 0 decides which gradients are in a round.

`give` sends all buckets, except for server 0's part of the first one. `finish` sends that part: when server 0 has it,
the servers have, or are about to have, all gradients of this worker. Its reply names the gradients of the round, and
`finish` asks the other servers for their means. ps/server/meeting/quorum.py describes what becomes of late workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from torchfleet.api.hybrid.server_rounds import Part, ServerRounds, Told
from torchfleet.base.errors import WireError
from torchfleet.ps.net.wire import Array, unpack
from torchfleet.ps.worker.client.shard import Floats

Given = tuple[int, int]  # a worker, and the round that it computed its gradients for


class Decided(msgspec.Struct):
    """The first array of a reply: which gradients are in the mean and, from server 0, what follows from the round."""

    parts: list[Given] = []
    round: int = 0
    told: dict[int, Told] = {}  # by worker that was on time
    entering: list[int] = []
    members: list[int] = []  # that take part from now on
    processes: dict[int, int] = {}  # by worker of `parts`: the incarnation of the process that gave them
    sender: int = -1  # the worker that sends the network to `entering`
    leaver: int = -1  # the last worker to leave, which leaves the network with the servers
    is_late: bool = False  # this worker's gradients are not in the round that they were computed for
    is_dropped: bool = False  # nor in a later one
    is_over: bool = False  # later rounds have been made: this worker must enter again


@dataclass
class QuorumRounds(ServerRounds):
    """As ServerRounds. Rounds are made by the first `quorum` workers that come."""

    quorum: int = 0
    max_age: int = 0
    num_on_time: int = 0
    num_late: int = 0
    num_dropped: int = 0
    num_missed: int = 0  # rounds after which this worker had to enter again
    samples_dropped: float = 0.0
    parts: list[Given] = field(default_factory=list)  # whose gradients were in the last round, in the order of the sum
    _first: tuple[dict[str, Any], Floats] | None = field(default=None, repr=False)
    _own: Told = field(default_factory=Told, repr=False)

    def give(self, values: Floats, own: Told) -> None:
        """Send the next bucket of this round. Do not change `values` before `finish` has returned."""
        bucket, self._own = len(self._sizes), own
        self._sizes.append(len(values))
        for server, (start, stop) in self._spans(bucket, len(values)).items():
            body = {**self._body(bucket), "workers": [self.worker], "samples": own.samples}
            if (bucket, server) == (0, 0):
                told = {"seconds": own.seconds, "is_last": own.is_last, "rates": own.rates, "decides": True}
                self._first = {**body, **told}, values[start:stop]
            else:
                future = self.client.exchange(server, body, values[start:stop], self.timeout)
                self._parts.append(Part(bucket, server, future))
        self.num_bytes += values.nbytes

    def finish(self) -> list[Floats] | None:
        """Wait for the means of the round, in the order of the buckets. Returns None if this round and a later one were
        made before this worker came: it then cannot step as the others do."""
        start = time.perf_counter()
        assert self._first is not None
        parts, sizes, self._parts, self._sizes = self._parts, self._sizes, [], []
        (body, values), self._first = self._first, None
        reply = self.client.exchange(0, body, values, self.timeout).result()
        decided = unpack(reply[0], Decided)
        for part in parts:
            part.future.result()
        self._count(decided)
        means = None if decided.is_over else self._means(decided, _mean(reply), parts)
        self._end_round(decided, is_missed=means is None)
        self.seconds += time.perf_counter() - start
        return None if means is None else [self._joined(bucket, size, means) for bucket, size in enumerate(sizes)]

    def _means(self, decided: Decided, first: Floats, parts: list[Part]) -> dict[tuple[int, int], Floats] | None:
        """The means by bucket and server; None if a later round was made meanwhile."""
        places = [(part.bucket, part.server) for part in parts]
        replies = {(0, 0): (decided, first), **self._ask(places, decided, decided.parts)}
        common = [part for part in decided.parts if all(part in found.parts for found, _ in replies.values())]
        lacking = [place for place, (found, _) in replies.items() if found.parts != common]
        if lacking and common:  # a worker was lost while it sent its gradients
            self.num_again += len(lacking)
            replies |= self._ask(lacking, decided, common)
        is_whole = common and all(found.parts == common for found, _ in replies.values())
        self.parts = common if is_whole else []
        return {place: mean for place, (_, mean) in replies.items()} if is_whole else None

    def _ask(
        self, places: list[tuple[int, int]], decided: Decided, parts: list[Given]
    ) -> dict[tuple[int, int], tuple[Decided, Floats]]:
        body = {"round": decided.round, "workers": [], "again": True, "parts": parts, "processes": decided.processes}
        futures = {}
        for bucket, server in places:
            asked = {**self._body(bucket), **body, "decides": (bucket, server) == (0, 0)}
            futures[bucket, server] = self.client.exchange(server, asked, None, self.timeout)
        replies = {place: future.result() for place, future in futures.items()}
        return {place: (unpack(reply[0], Decided), _mean(reply)) for place, reply in replies.items()}

    def _body(self, bucket: int) -> dict[str, Any]:
        return {"round": self.number, "bucket": bucket, "quorum": self.quorum, "max_age": self.max_age}

    def _count(self, decided: Decided) -> None:
        """Note what becomes of this worker's own gradients."""
        self.num_on_time += not decided.is_late
        self.num_late += decided.is_late and not decided.is_dropped
        self.num_dropped += decided.is_dropped
        self.samples_dropped += (self._own.samples or 0.0) if decided.is_dropped else 0.0

    def _end_round(self, decided: Decided, is_missed: bool) -> None:
        """Note who takes part in the next round."""
        self.is_missed, self.is_in = is_missed, not is_missed and not self._own.is_last
        self.newcomers, self.leaves_copy = [], False
        self.number += 1
        self.num_made += not is_missed
        self.num_missed += is_missed
        if not is_missed:
            self.told, self.workers = decided.told, decided.members
            self.newcomers = list(decided.entering) if decided.sender == self.worker else []
            self.is_behind = self._own.samples == 0 and any(own.samples != 0 for own in self.told.values())
            self.leaves_copy = decided.leaver == self.worker and not self.is_behind


def _mean(reply: Sequence[Array]) -> Floats:
    """The mean in a reply; empty if the round is over."""
    if len(reply) == 1:
        return np.empty(0, np.float32)
    if len(reply) != 2 or reply[1].data.dtype != np.float32:
        raise WireError(f"expected the gradients of a mean and the mean, found {len(reply)} arrays")
    return reply[1].data.reshape(-1)
