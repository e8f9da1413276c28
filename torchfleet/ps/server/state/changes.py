"""Keeps, for each worker, the rows that other workers changed since it last asked (geo training)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.merge import unique

Keys = npt.NDArray[np.uint64]
_NONE: Keys = np.empty(0, np.uint64)


@dataclass(slots=True)
class Record:
    """One worker's list of keys for one table. Duplicates are removed whenever it doubles, so it stays below twice the
    number of rows."""

    pending: list[Keys] = field(default_factory=list)
    sent: Keys = field(default_factory=lambda: _NONE)  # in the last reply, which may be lost
    num_pending: int = 0
    compact_at: int = 1 << 16

    def note(self, keys: Keys) -> None:
        self.pending.append(keys)
        self.num_pending += len(keys)
        if self.num_pending > self.compact_at:
            self.pending = [unique(np.concatenate(self.pending))[0]]
            self.num_pending = len(self.pending[0])
            self.compact_at = max(1 << 16, 2 * self.num_pending)

    @classmethod
    def restored(cls, pending: bytes, sent: bytes) -> Record:
        """A record from the keys that `Changes.export` wrote as bytes."""
        keys = np.frombuffer(pending, np.uint64)
        return cls([keys], np.frombuffer(sent, np.uint64), len(keys), max(1 << 16, 2 * len(keys)))


class Changes:
    """The keys that other workers changed, by worker and table. Recording begins with a worker's first `since`."""

    def __init__(self) -> None:
        self._records: dict[int, dict[int, Record]] = {}
        self._numbers: dict[int, int] = {}
        self._clients: dict[int, int] = {}

    def note(self, table: int, keys: Keys, worker: int) -> None:
        """`worker` changed these rows."""
        held = keys.copy()  # the memory belongs to the request
        for other, records in self._records.items():
            if other != worker and len(keys):
                records.setdefault(table, Record()).note(held)

    def export(self) -> list[Any]:
        """The state as plain values."""
        return [
            [
                worker, self._numbers[worker], self._clients[worker],
                {t: [np.concatenate([_NONE, *r.pending]).tobytes(), r.sent.tobytes()] for t, r in records.items()},
            ]
            for worker, records in self._records.items()
        ]  # fmt: skip

    def restore(self, kept: list[Any]) -> None:
        """Restore the state from the result of `export`."""
        self._records, self._numbers, self._clients = {}, {}, {}
        for worker, number, client, records in kept:
            self._numbers[worker], self._clients[worker] = number, client
            self._records[worker] = {t: Record.restored(*keys) for t, keys in records.items()}

    def since(
        self, worker: int, received: int, most: dict[int, int], client: int = 0
    ) -> tuple[int, dict[int, Keys], int]:
        """(number of this reply, changed keys by table, number of keys left for the next reply).

        `received`: the number of the last reply that the worker received. A client's first 0 resets its records; a
        further 0 may be a late copy. `most`: the most keys to return, by table.
        """
        if worker not in self._records or (received == 0 and client != self._clients[worker]):
            self._records[worker], self._numbers[worker], self._clients[worker] = {}, 0, client
        arrived = received == self._numbers[worker]
        self._numbers[worker] += 1
        changed, rest = {}, 0
        for table, num in most.items():
            record = self._records[worker].setdefault(table, Record())
            lost = _NONE if arrived else record.sent
            keys = unique(np.concatenate([lost, *record.pending]))[0]
            record.sent = changed[table] = keys[:num]
            record.pending, record.num_pending = [keys[num:]], len(keys[num:])
            rest += record.num_pending
        return self._numbers[worker], changed, rest
