"""Reads from the replicas of shards: a slow answer is asked for a second time, and the first answer counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.apps.serve.shards.shard_replica import ShardReplica
from torchfleet.base.errors import FleetError
from torchfleet.ps.tables.settings.spec import Floats

Keys = npt.NDArray[np.uint64]


@dataclass
class ReadCounts:
    """Counters of one shard."""

    num_reads: int = 0
    num_hedged: int = 0  # reads that were sent to a second replica because the first was slow
    num_won: int = 0  # of these, answered by the second replica first
    num_failed_over: int = 0  # reads that went to another replica because one had failed
    num_failed: int = 0  # reads that no replica answered


class Shard:
    """The replicas of one shard."""

    def __init__(self, replicas: Sequence[ShardReplica]) -> None:
        self.replicas = list(replicas)
        self.counts = ReadCounts()

    def read(self, table: str, keys: Keys) -> HedgedRead:
        """Begin to read rows. `finish` waits for the answer."""
        for replica in self.replicas:
            replica.probe()
        self.counts.num_reads += 1
        return HedgedRead(sorted(self.replicas, key=lambda replica: replica.is_suspect), self.counts, table, keys)


class HedgedRead:
    """One read in progress. A replica that has not answered after the p95 of its latency is not waited for alone."""

    def __init__(self, order: Sequence[ShardReplica], counts: ReadCounts, table: str, keys: Keys) -> None:
        self._rest, self._counts, self._table, self._keys = list(order), counts, table, keys
        self._asked: list[tuple[ShardReplica, Future[Floats]]] = []
        self._hedge_at = 0.0
        self._first: ShardReplica | None = None
        self._is_hedged = False
        self.rows: Floats | None = None
        self._ask()

    @property
    def futures(self) -> list[Future[Floats]]:
        return [future for _, future in self._asked]

    def seconds_to_hedge(self) -> float | None:
        """Seconds until `look` may ask another replica; None if all have been asked."""
        return max(0.0, self._hedge_at - time.monotonic()) if self._rest else None

    def look(self) -> None:
        """Take an answer if there is one; otherwise ask another replica when it is time, or when all asked have failed.

        Raises the last replica's FleetError if all have failed.
        """
        for replica, future in list(self._asked):
            if not future.done():
                continue
            error = future.exception()
            if error is None:
                self._counts.num_won += self._is_hedged and replica is not self._first
                self.rows = future.result()
                return
            self._asked.remove((replica, future))
            if not self._asked and not self._rest:
                self._counts.num_failed += 1
                raise error if isinstance(error, FleetError) else FleetError(f"{replica.endpoint}: {error}")
        if not self._asked:
            self._counts.num_failed_over += 1
            self._ask()
        elif self._rest and time.monotonic() >= self._hedge_at:
            self._counts.num_hedged += 1
            self._is_hedged = True
            self._ask()

    def _ask(self) -> None:
        replica = self._rest.pop(0)
        self._first = self._first or replica
        self._hedge_at = time.monotonic() + replica.p95
        self._asked.append((replica, replica.read(self._table, self._keys)))


def finish(reads: Sequence[HedgedRead]) -> list[Floats]:
    """Wait for all reads, and return their rows in order. Raises FleetError if no replica of a shard answers."""
    while pending := [read for read in reads if read.rows is None]:
        pauses = [pause for read in pending if (pause := read.seconds_to_hedge()) is not None]
        wait([future for read in pending for future in read.futures], min(pauses, default=None), FIRST_COMPLETED)
        for read in pending:
            read.look()
    return [read.rows for read in reads if read.rows is not None]
