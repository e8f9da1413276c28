"""Requests in flight to several servers, and their results."""

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
    """Whole dense tables by name; `versions`: per server, each table's number of updates, where known."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, list[float]] = {}

    @classmethod
    def joined(cls, tables: Sequence[str], replies: list[Sequence[Array]]) -> Dense:
        """Join the servers' shards into tables, with their versions if the replies have them. Empty if a server sent no
        values because it answered a retry.
        """
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


def joined_block(replies: list[Sequence[Array]], index: int) -> Floats:
    """Join the servers' shards of a dense table: the arrays with this index."""
    if len(replies) == 1:
        return replies[0][index].data.reshape(-1)
    return np.concatenate([reply[index].data.reshape(-1) for reply in replies])


@dataclass(slots=True)
class Pulled:
    """Rows by table, and per server the table's number of updates at the pull."""

    rows: dict[str, Floats]
    versions: dict[str, list[float]]

    @staticmethod
    def joined(parts: list[Pulled]) -> Pulled:
        """Join the rows of all parts, in order. Takes the versions of the first part, which are the oldest."""
        rows = {name: np.concatenate([part.rows[name] for part in parts]) for name in parts[0].rows}
        return Pulled(rows, parts[0].versions)


@dataclass(slots=True)
class Changed:
    """The numbers of the replies, per server, and by table (keys, rows); a dense table has no keys.

    If `is_all` is False, there were more changes than a reply holds: request again.
    """

    numbers: list[int]
    rows: dict[str, tuple[Keys, Floats]]
    is_all: bool

    def joined(self, later: Changed) -> Changed:
        """Join both; for a key that is in both, the later row comes last."""
        rows = {
            name: (np.concatenate([keys, later.rows[name][0]]), np.concatenate([values, later.rows[name][1]]))
            if len(keys)
            else later.rows[name]  # also replaces the older block of a dense table
            for name, (keys, values) in self.rows.items()
        }
        return Changed(later.numbers, rows, later.is_all)


@dataclass(slots=True)
class Future(Generic[Result]):
    """Requests in flight to the servers that they concern; `finish` makes the result from the replies."""

    _waits: Sequence[tuple[Connection, Call]]
    _finish: Callable[[list[Sequence[Array]]], Result]
    is_awaited: bool = False

    @property
    def is_done(self) -> bool:
        """Whether all replies are in. Does not poll: replies arrive while the client waits for a result or sends a
        request.
        """
        return all(call.is_done for _, call in self._waits)

    def result(self) -> Result:
        """Wait for all replies. Raises the first error; every wait ends at the request's time-out."""
        self.is_awaited = True
        replies = []
        for connection, call in self._waits:
            replies.append(connection.wait(call))
        return self._finish(replies)

    def give_up(self) -> None:
        """Stop retrying the requests that are not answered yet."""
        for connection, call in self._waits:
            connection.give_up(call)

    @classmethod
    def joined(cls, futures: Sequence[Future[Other]], join: Callable[[list[Other]], Result]) -> Future[Result]:
        """Several futures as one; `join` combines their results."""
        numbers = [len(future._waits) for future in futures]
        ends = [sum(numbers[: i + 1]) for i in range(len(numbers))]

        def finish(replies: list[Sequence[Array]]) -> Result:
            parts = zip(futures, numbers, ends, strict=True)
            return join([future._finish(replies[end - num : end]) for future, num, end in parts])

        return cls([wait for future in futures for wait in future._waits], finish)

    def then(self, choose: Callable[[Result], Other]) -> Future[Other]:
        """A future of the same requests whose result is passed through `choose`."""
        return Future(self._waits, lambda replies: choose(self._finish(replies)))


@dataclass(slots=True)
class Ready:
    """A pull whose result is already there."""

    _pulled: Pulled

    def result(self) -> Pulled:
        return self._pulled
