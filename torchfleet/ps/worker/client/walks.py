"""Iteration over all rows of a table, on all servers at once, in messages of a few megabytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from torchfleet.ps.net.wire import STATE, Array, Command
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.connection import Call, Connection
from torchfleet.ps.worker.client.requests import Requests
from torchfleet.ps.worker.client.shard import Floats, Keys

WALK_BYTES = 4 << 20  # bytes of one reply
_KEY_BYTES = 8


class Walks(Requests):
    """Requests that return whole tables."""

    def walk(self, spec: TableSpec) -> Iterator[tuple[Keys, Floats]]:
        """Yield (keys, values) of all rows of a table, in chunks, in no order. The next chunks are requested meanwhile.

        Keys are distinct, unless a row is dropped and created again during the walk. The arrays are valid only until
        the next iteration: they are views of a message. A caller that stops early must close the client.
        """
        num_rows = max(1, WALK_BYTES // (_KEY_BYTES + 4 * spec.dim))

        for keys, values, _ in self._walk(spec, num_rows, 0):
            yield keys, values

    def walk_rows(self, spec: TableSpec) -> Iterator[tuple[Keys, Floats, int]]:
        """As `walk`, with the state of each row behind its values: (keys, rows (keys, num_words), the server's step).
        There is at least one chunk of each server, which may be empty.
        """
        yield from self._walk(spec, max(1, WALK_BYTES // (_KEY_BYTES + 4 * spec.num_words)), STATE)

    def _walk(self, spec: TableSpec, num_rows: int, flags: int) -> Iterator[tuple[Keys, Floats, int]]:
        def ask(connection: Connection, cursor: int) -> Call:
            place = Array(spec.number, np.array([cursor, num_rows], np.uint64))
            return connection.submit(Command.WALK, [place], flags)

        under_way = deque((connection, ask(connection, 0)) for connection in self._connections)
        while under_way:
            connection, call = under_way.popleft()
            after, keys, values = connection.wait(call)
            cursor = int(after.data[0, 0])
            if cursor:
                under_way.append((connection, ask(connection, cursor)))
            yield keys.data.reshape(-1), values.data, int(after.data[-1, 0])
