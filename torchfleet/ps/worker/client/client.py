"""A worker's view of the fleet of servers: pull and push, to all owners at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import BOUNDED, DENSE_BACK, NO_CREATE, SYNC, VERSIONS, Array, Command, pack
from torchfleet.ps.tables.dense_table import WITH_STATE
from torchfleet.ps.tables.settings.spec import TableSpec, shard_range
from torchfleet.ps.worker.client.future import Changed, Dense, Future, Pulled
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.client.sharded_tables import NO_KEYS, ShardedTables
from torchfleet.ps.worker.client.walks import Walks


class Client(Walks):
    """Pull and push over `channels`, one per server, in the same order in every client. Belongs to one thread.

    Every call sends one message per server, to all of them before it waits for any. Methods that return a Future do
    not wait; the others do. At most `window` requests per server are under way: one more waits for the oldest.
    """

    def __init__(self, channels: Sequence[Channel], **options: Any) -> None:
        super().__init__(channels, **options)
        self._tables = ShardedTables(self.num_servers)
        self._unawaited: deque[Future[Dense]] = deque()

    def create_table(self, spec: TableSpec) -> None:
        """Make a table on all servers. Doing it again with the same description does no harm."""
        shards = [spec.for_shard(server, self.num_servers) for server in range(self.num_servers)]
        self._ask(Command.CREATE_TABLE, [[pack(shard)] for shard in shards]).result()
        self.attach(spec)

    def attach(self, spec: TableSpec) -> None:
        """Use a table that another client made."""
        self._tables.attach(spec)

    def pull(self, table: str, keys: npt.ArrayLike, create: bool = True) -> Future[Floats]:
        """Rows for `keys`, shape (number of keys, dim), in their order. Keys may repeat; missing ones are created,
        or with create=False read as zeros."""
        return self.pull_tables({table: keys}, create).then(lambda pulled: pulled.rows[table])

    def pull_tables(
        self, keys: Mapping[str, npt.ArrayLike], create: bool = True, in_step: bool = False
    ) -> Future[Pulled]:
        """Rows of several tables in one message per server, or in several messages if they are very many. `in_step`: of
        a step that all workers make together."""
        parts = self._tables.parts_of(keys, create)
        if len(parts) > 1:
            return Future.joined([self._pull_part(part, create, in_step) for part in parts], Pulled.joined)
        return self._pull_part(keys, create, in_step)

    def _pull_part(self, keys: Mapping[str, npt.ArrayLike], create: bool, in_step: bool) -> Future[Pulled]:
        tables = self._tables
        shards = {name: tables.shard_keys(name, wanted) for name, wanted in keys.items()}
        arrays = [
            [Array(tables.specs[name].number, sharded.of(server)) for name, sharded in shards.items()]
            for server in range(self.num_servers)
        ]

        def finish(replies: list[list[Array]]) -> Pulled:
            rows = {
                name: tables.gather_rows(name, sharded, [reply[i].data for reply in replies])
                for i, (name, sharded) in enumerate(shards.items())
            }
            versions = [reply[-1].data.reshape(-1) for reply in replies]
            return Pulled(rows, {name: [float(v[i]) for v in versions] for i, name in enumerate(shards)})

        flags = VERSIONS | (0 if create else NO_CREATE) | (SYNC if in_step else 0)
        counts = create and any(tables.counted[name] for name in shards)  # a repeat must not count again
        return self._ask(Command.PULL, arrays, flags, once=counts, finish=finish)

    def push(self, table: str, keys: npt.ArrayLike, grads: Floats, lr: float | None = None) -> Future[Dense]:
        """One update of a sparse table; `lr` takes the place of its own. Leave `grads` alone until it is done."""
        return self.push_tables({table: (keys, grads)}, {} if lr is None else {table: lr})

    def push_tables(
        self,
        grads: Mapping[str, tuple[npt.ArrayLike, Floats] | Floats],
        rates: Mapping[str, float] | None = None,
        versions: Mapping[str, Sequence[float]] | None = None,
        flags: int = 0,
        timeout: float | None = None,
        num_samples: float | None = None,
        settings: Sequence[int] = (),
    ) -> Future[Dense]:
        """One update of several tables in one message per server: (keys, rows) for a sparse, a block for a dense one.

        `num_samples`: how many the gradients come from, by which a mean weights them. `settings`: the numbers that the
        flags GATHERED and BOUNDED need.
        An error of a push that nobody waits for is raised by the next push or by `flush`. The result holds the dense
        tables' new values if the flag DENSE_BACK asked for them, and is empty if that reply had to be repeated.
        """
        while self._unawaited and self._unawaited[0].is_done:
            self._await_oldest()
        given, seen = rates or {}, versions or {}
        for name, rate in given.items():
            if not 0 <= rate < np.inf:
                raise TableError(f"a learning rate must be a finite number >= 0, found {rate} for table '{name}'")
        weight = [] if num_samples is None else [float(num_samples)]
        arrays: list[list[Array]] = []
        for i in range(self.num_servers):
            lines = [[given.get(name, np.nan), seen[name][i] if name in seen else np.nan, *weight] for name in grads]
            arrays.append([Array(0, np.array(lines))])
        for name, block in grads.items():
            for server, pair in enumerate(self._tables.shard_gradients(name, block)):
                arrays[server].extend(pair)
        if settings:
            for message in arrays:
                message.append(Array(0, np.array(settings, np.uint64)))
        dense = [name for name, block in grads.items() if not isinstance(block, tuple)]

        def finish(replies: list[list[Array]]) -> Dense:
            return _dense(dense, replies) if flags & DENSE_BACK else Dense()

        future = self._ask(Command.PUSH, arrays, flags, once=True, timeout=timeout, finish=finish)
        self._unawaited.append(future)
        return future

    def pull_changed(self, tables: Sequence[str], received: Sequence[int]) -> Future[Changed]:
        """What other workers changed (geo training): rows of sparse tables, whole dense tables.

        `received`: per server, the number of the last result that was taken in; zeros to begin with.
        """
        numbers = [self._tables.spec(name).number for name in tables]
        arrays = [
            [Array(0, np.array([last], np.uint64)), *(Array(number, NO_KEYS) for number in numbers)]
            for last in received
        ]

        def finish(replies: list[list[Array]]) -> Changed:
            rows: dict[str, tuple[Keys, Floats]] = {}
            for i, name in enumerate(tables):
                keys = np.concatenate([reply[1 + 2 * i].data.reshape(-1) for reply in replies])
                rows[name] = keys, np.concatenate([reply[2 + 2 * i].data for reply in replies])
            numbers = [[int(number) for number in reply[0].data.reshape(-1)] for reply in replies]
            return Changed([first for first, _ in numbers], rows, is_all=not any(rest for _, rest in numbers))

        return self._ask(Command.PULL_CHANGED, arrays, finish=finish)

    def pull_dense(self, table: str) -> Future[Floats]:
        """The whole block of a dense table."""
        spec = self._tables.dense_spec(table)
        arrays = [[self._whole(spec, server)] for server in range(self.num_servers)]
        return self._ask(Command.PULL, arrays, finish=lambda replies: _joined(replies, 0))

    def pull_block(self, table: str) -> tuple[Floats, int]:
        """A dense table with its optimizer's state: a row of values, and one for each kind of state; and its steps."""
        spec = self._tables.dense_spec(table)
        num_rows = 1 + spec.num_states
        ranges = [shard_range(spec.size, i, self.num_servers) for i in range(self.num_servers)]
        arrays = [[Array(spec.number, np.array([0, stop - start, WITH_STATE], np.uint64))] for start, stop in ranges]

        def finish(replies: list[list[Array]]) -> tuple[Floats, int]:
            blocks = [reply[0].data.reshape(num_rows, -1) for reply in replies]
            return np.concatenate(blocks, axis=1), max(int(reply[-1].data[0, 0]) for reply in replies)

        asked: Future[tuple[Floats, int]] = self._ask(Command.PULL, arrays, VERSIONS, finish=finish)
        return asked.result()

    def set_block(self, table: str, block: Floats, step: int) -> None:
        """Overwrite a dense table: values and state, as `pull_block` gives them, after so many steps."""
        number = self._tables.dense_spec(table).number
        place = Array(number, np.array([0, step, WITH_STATE], np.uint64))
        rows = [self._tables.shard_block(table, row) for row in block]
        shards = [np.concatenate([row[server] for row in rows]) for server in range(self.num_servers)]
        self._ask(Command.SET, [[place, Array(number, shard)] for shard in shards], once=True).result()

    def pull_dense_tables(self, tables: Sequence[str], is_bounded: bool = False) -> Future[Dense]:
        """Several whole dense tables with their versions, in one message per server.

        `is_bounded`: this worker is going to push gradients of them, and no other one may get too far ahead of it.
        """
        specs = [self._tables.dense_spec(name) for name in tables]
        arrays = [[self._whole(spec, server) for spec in specs] for server in range(self.num_servers)]
        flags = VERSIONS | (BOUNDED if is_bounded else 0)
        return self._ask(Command.PULL, arrays, flags, finish=lambda replies: _dense(tables, replies))

    def _whole(self, spec: TableSpec, server: int) -> Array:
        """What asks a server for its whole shard of a dense table."""
        start, stop = shard_range(spec.size, server, self.num_servers)
        return Array(spec.number, np.array([0, stop - start], np.uint64))

    def push_dense(self, table: str, grads: Floats, lr: float | None = None) -> Future[Dense]:
        """One update of a dense table."""
        return self.push_tables({table: grads}, {} if lr is None else {table: lr})

    def set_dense(self, table: str, values: Floats) -> None:
        """Overwrite a dense table."""
        number = self._tables.dense_spec(table).number
        first = Array(number, np.zeros(1, np.uint64))
        shards = self._tables.shard_block(table, values)
        self._ask(Command.SET, [[first, Array(number, shard)] for shard in shards], once=True).result()

    def assign(self, table: str, keys: npt.ArrayLike, values: Floats) -> None:
        """Overwrite rows of a sparse table: their values, or values and state when `values` is that wide."""
        pairs = self._tables.shard_rows(table, keys, values)
        self._ask(Command.SET, [list(pair) for pair in pairs], once=True).result()

    def erase(self, table: str, keys: npt.ArrayLike) -> None:
        """Drop rows; keys without one are passed over."""
        shards, number = self._tables.shard_keys(table, keys), self._tables.spec(table).number
        arrays = [[Array(number, shards.of(server))] for server in range(self.num_servers)]
        self._ask(Command.ERASE, arrays, once=True).result()

    def flush(self) -> None:
        """Wait until every push has been applied; raises what went wrong with any of them."""
        while self._unawaited:
            self._await_oldest()

    def leave(self) -> None:
        """Apply what is under way and tell the servers that this worker has done its work."""
        self.flush()
        self._ask(Command.LEAVE).result()

    def _await_oldest(self) -> None:
        oldest = self._unawaited.popleft()
        if not oldest.is_awaited:
            oldest.result()


def _dense(tables: Sequence[str], replies: list[list[Array]]) -> Dense:
    """Dense tables from the servers' shards, and their versions, if those come behind them; nothing if a server sent
    no values: it has answered a repeat."""
    num = len(tables)
    if any(len(reply) < num for reply in replies):
        return Dense()
    versions: dict[str, list[float]] = {}
    if all(len(reply) == num + 1 for reply in replies):
        seen = [reply[num].data.reshape(-1) for reply in replies]
        versions = {name: [float(numbers[i]) for numbers in seen] for i, name in enumerate(tables)}
    return Dense({name: _joined(replies, i) for i, name in enumerate(tables)}, versions)


def _joined(replies: list[list[Array]], index: int) -> Floats:
    """A dense table from its servers' shards."""
    shards = [reply[index].data.reshape(-1) for reply in replies]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)
