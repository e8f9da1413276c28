"""A worker's side of the rounds in which the network is exchanged through the servers.

A round begins with the first bucket that `give` sends, while backward still runs, and ends with `finish`, which waits
for the means. ps/server/meeting/rounds.py describes what the servers do, and why all workers get the same means.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from torchfleet.base.errors import WireError
from torchfleet.ps.net.wire import Array, unpack
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future
from torchfleet.ps.worker.client.shard import Floats

_ONE_SERVER = 1 << 12  # numbers of a bucket that go to one server: a message costs more than what it carries


class Told(msgspec.Struct, array_like=True):
    """What a worker reports with its gradients."""

    samples: float | None = None  # 0: the worker has no batch, and gives zeros
    seconds: float = 0.0
    is_last: bool = False
    rates: list[float] = []


class Made(msgspec.Struct):
    """The first array of a reply: whose gradients are in the mean and, for the first bucket, the workers' reports."""

    workers: list[int]
    told: dict[int, Told] = {}
    entering: list[int] = []
    leaving: list[int] = []


class Entered(msgspec.Struct):
    """The first array of the reply to ENTER."""

    round: int  # the first round that this worker takes part in; without entering: the round of the copy that follows
    workers: list[int] = []
    holders: list[int] = []  # have the newest network; empty: a copy follows, or the tables have the newest


@dataclass
class Part:
    """One server's span of a bucket."""

    bucket: int
    server: int
    future: Future[Sequence[Array]]


@dataclass
class ServerRounds:
    """The rounds of one worker. Belongs to the thread that trains, and so does `client`."""

    client: Client
    worker: int
    timeout: float
    number: int = 0
    workers: list[int] = field(default_factory=list)  # that take part in the next round
    is_in: bool = False  # whether this worker takes part in the next round
    is_end: bool = False  # the last batches of all workers were in the last round
    is_behind: bool = False  # this worker gave no samples to the last round, and does not step by its mean
    told: dict[int, Told] = field(default_factory=dict)  # by worker of the last round
    newcomers: list[int] = field(default_factory=list)  # to whom this worker sends the network, after its step
    is_missed: bool = (
        False  # the last round was made without this worker, whose network is older now (quorum_rounds.py)
    )
    leaves_copy: bool = False  # all workers leave after this round, and this one leaves the network with the servers
    num_made: int = 0
    num_again: int = 0  # means that were asked for again, because a worker was lost within a round
    seconds: float = 0.0  # that this worker waited for means
    num_bytes: int = 0  # of gradients that it sent
    _parts: list[Part] = field(default_factory=list)
    _num_entered: int = 0
    _sizes: list[int] = field(default_factory=list)

    def enter(self) -> tuple[Entered, list[Array]]:
        """Take part from the next round on. Waits until the others have made their round, or until all have come. Also
        returns the copy of the network, if one was left with the servers."""
        self._num_entered += 1
        head, *copy = self.client.enter(self._num_entered, self.timeout)
        found = unpack(head, Entered)
        self.begin(found.round, found.workers)
        if self.worker in found.holders and self.worker == min(found.holders):
            self.newcomers = [worker for worker in found.workers if worker not in found.holders]
        return found, copy

    def newer_copy(self) -> list[Array]:
        """The copy of the network that others have left since this worker's last step; empty if there is none."""
        head, *copy = self.client.enter(0, self.timeout)
        found = unpack(head, Entered)
        if found.round < self.number - self.is_behind:
            return []
        self.number, self.is_behind = found.round + 1, False
        return copy

    def begin(self, number: int, workers: Sequence[int]) -> None:
        """Set the number and the workers of the next round."""
        self.number, self.workers, self.is_in, self.newcomers = number, sorted(workers), True, []

    def give(self, values: Floats, own: Told) -> None:
        """Send the next bucket of this round. Do not change `values` before `finish` has returned."""
        bucket = len(self._sizes)
        self._sizes.append(len(values))
        body: dict[str, Any] = {"round": self.number, "bucket": bucket, "workers": self.workers}
        body |= {"samples": own.samples}
        if bucket == 0:
            body |= {"seconds": own.seconds, "is_last": own.is_last, "rates": own.rates}
        for server, (start, stop) in self._spans(bucket, len(values)).items():
            future = self.client.exchange(server, body, values[start:stop], self.timeout)
            self._parts.append(Part(bucket, server, future))
        self.num_bytes += values.nbytes

    def finish(self) -> list[Floats] | None:
        """Wait for the means of all buckets that were given, in their order. Ends the round. Returns None if this
        worker missed it.
        """
        start = time.perf_counter()
        parts, sizes, self._parts, self._sizes = self._parts, self._sizes, [], []
        replies = [_read(part.future.result()) for part in parts]
        common = sorted(set.intersection(*(set(made.workers) for made, _ in replies)))
        means: dict[tuple[int, int], Floats] = {}
        for part, (made, mean) in zip(parts, replies, strict=True):
            is_whole = made.workers == common
            means[part.bucket, part.server] = mean if is_whole else self._again(part, common)
        self._end(common, replies[0][0])
        self.seconds += time.perf_counter() - start
        return [self._joined(bucket, size, means) for bucket, size in enumerate(sizes)]

    @property
    def rates(self) -> list[float]:
        """The learning rates of the last round's first worker, with which all workers step the network."""
        return self.told[self._stepping[0]].rates if self.told else []

    @property
    def _stepping(self) -> list[int]:
        """The workers that step by the mean of the last round: those that gave samples. All of them, if none did: then
        the mean changes nothing."""
        return sorted(worker for worker, own in self.told.items() if own.samples != 0) or sorted(self.told)

    def _again(self, part: Part, workers: list[int]) -> Floats:
        self.num_again += 1
        body = {"round": self.number, "bucket": part.bucket, "workers": workers, "again": True}
        return _read(self.client.exchange(part.server, body, None, self.timeout).result())[1]

    def _end(self, common: list[int], first: Made) -> None:
        """Note who takes part in the next round. All workers come to the same result."""
        self.told = {worker: first.told[worker] for worker in common if worker in first.told}
        staying = sorted(set(common) - set(first.leaving))
        self.is_end = not first.leaving and all(own.is_last for own in self.told.values())
        self.is_behind = self.worker not in self._stepping
        self.workers = sorted({*staying, *first.entering})
        self.is_in = self.worker in staying
        self.newcomers = list(first.entering) if staying and self.worker == staying[0] else []
        self.leaves_copy = not staying and self.worker == self._stepping[0]
        self.number += 1
        self.num_made += 1

    def _spans(self, bucket: int, size: int) -> dict[int, tuple[int, int]]:
        """By server, its span of a bucket. A small bucket goes to one server, the first one to server 0."""
        num = self.client.num_servers
        if size <= _ONE_SERVER or num == 1:
            return {bucket % num: (0, size)}
        bounds = [size * server // num for server in range(num + 1)]
        return {server: (bounds[server], bounds[server + 1]) for server in range(num)}

    def _joined(self, bucket: int, size: int, means: dict[tuple[int, int], Floats]) -> Floats:
        spans = self._spans(bucket, size)
        parts = [means[bucket, server] for server in spans]
        if [len(part) for part in parts] != [stop - start for start, stop in spans.values()]:
            raise WireError(f"expected the means of {size:,} gradients, found {sum(map(len, parts)):,}")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _read(reply: Sequence[Array]) -> tuple[Made, Floats]:
    if len(reply) != 2 or reply[1].data.dtype != np.float32:
        raise WireError(f"expected the workers of a mean and the mean, found {len(reply)} arrays")
    return unpack(reply[0], Made), reply[1].data.reshape(-1)
