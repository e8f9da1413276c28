"""Iteration over all rows of a table, on all servers at once, in messages of a few megabytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from torchfleet.ps.net.wire import Array, Command
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

        def ask(connection: Connection, cursor: int) -> Call:
            return connection.submit(Command.WALK, [Array(spec.number, np.array([cursor, num_rows], np.uint64))])

        under_way = deque((connection, ask(connection, 0)) for connection in self._connections)
        while under_way:
            connection, call = under_way.popleft()
            after, keys, values = connection.wait(call)
            cursor = int(after.data[0, 0])
            if cursor:
                under_way.append((connection, ask(connection, cursor)))
            yield keys.data.reshape(-1), values.data
