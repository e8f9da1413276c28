"""Requests under way to several servers, and what they bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from torchfleet.ps.net.wire import Array
from torchfleet.ps.worker.client.connection import Call, Connection
from torchfleet.ps.worker.client.shard import Floats, Keys

Result = TypeVar("Result")
Other = TypeVar("Other")


class Dense(dict[str, Floats]):
    """Whole dense tables by name; `versions`: per server how many updates each had seen, where that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, list[float]] = {}

    @classmethod
    def joined(cls, tables: Sequence[str], replies: list[list[Array]]) -> Dense:
        """Tables from the servers' shards, and their versions, if those come behind them; nothing if a server sent no
        values: it has answered a repeat."""
        found, has_versions = cls(), True
        for reply in replies:
            if len(reply) < len(tables):
                return found
            has_versions = has_versions and len(reply) == len(tables) + 1
        for i, name in enumerate(tables):
            found[name] = joined_block(replies, i)
            if has_versions:
                found.versions[name] = [float(reply[-1].data.reshape(-1)[i]) for reply in replies]
        return found


def joined_block(replies: list[list[Array]], index: int) -> Floats:
    """A dense table from the servers' shards of it, the arrays with this index."""
    if len(replies) == 1:
        return replies[0][index].data.reshape(-1)
    return np.concatenate([reply[index].data.reshape(-1) for reply in replies])


@dataclass(slots=True)
class Pulled:
    """Rows by table, and per server how many updates the table had seen by then."""

    rows: dict[str, Floats]
    versions: dict[str, list[float]]

    @staticmethod
    def joined(parts: list[Pulled]) -> Pulled:
        """Rows of all parts, in their order; versions of the first, which are the oldest."""
        rows = {name: np.concatenate([part.rows[name] for part in parts]) for name in parts[0].rows}
        return Pulled(rows, parts[0].versions)


@dataclass(slots=True)
class Changed:
    """The numbers of the replies, per server, and by table (keys, rows); a dense table has no keys.

    Unless `is_all`, more had been changed than a reply holds: ask again.
    """

    numbers: list[int]
    rows: dict[str, tuple[Keys, Floats]]
    is_all: bool

    def joined(self, later: Changed) -> Changed:
        """Both; of a key that is in both, what came later stands last."""
        rows = {
            name: (np.concatenate([keys, later.rows[name][0]]), np.concatenate([values, later.rows[name][1]]))
            if len(keys)
            else later.rows[name]  # which is also how a dense table's newer block takes the older one's place
            for name, (keys, values) in self.rows.items()
        }
        return Changed(later.numbers, rows, later.is_all)


@dataclass(slots=True)
class Future(Generic[Result]):
    """Requests under way to all servers they concern; `finish` makes the result of their replies."""

    _waits: Sequence[tuple[Connection, Call]]
    _finish: Callable[[list[list[Array]]], Result]
    is_awaited: bool = False

    @property
    def is_done(self) -> bool:
        """All answers are in. A wait for any of them takes them in, so `result` or another request may be needed."""
        return all(call.is_done for _, call in self._waits)

    def result(self) -> Result:
        """Wait for all answers. Raises the first error; every wait ends at the request's time-out."""
        self.is_awaited = True
        replies = []
        for connection, call in self._waits:
            replies.append(connection.wait(call))
        return self._finish(replies)

    @classmethod
    def joined(cls, futures: Sequence[Future[Other]], join: Callable[[list[Other]], Result]) -> Future[Result]:
        """Several at once; `join` makes one result of theirs."""
        numbers = [len(future._waits) for future in futures]
        ends = [sum(numbers[: i + 1]) for i in range(len(numbers))]

        def finish(replies: list[list[Array]]) -> Result:
            parts = zip(futures, numbers, ends, strict=True)
            return join([future._finish(replies[end - num : end]) for future, num, end in parts])

        return cls([wait for future in futures for wait in future._waits], finish)

    def then(self, choose: Callable[[Result], Other]) -> Future[Other]:
        """The same request, of whose result `choose` makes another."""
        return Future(self._waits, lambda replies: choose(self._finish(replies)))


@dataclass(slots=True)
class Ready:
    """A pull that has its result already."""

    _pulled: Pulled

    def result(self) -> Pulled:
        return self._pulled
