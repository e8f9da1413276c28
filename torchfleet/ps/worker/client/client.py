"""A worker's view of all servers: pull and push, to all owners at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.checkpoint.manifest import Parameter
from torchfleet.ps.net.joined_arrays import JoinedArrays
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import (
    BOUNDED,
    DENSE_BACK,
    FEW_ARRAYS,
    FORESEEN,
    NO_CREATE,
    STATE,
    SYNC,
    VERSIONS,
    Array,
    Command,
    pack,
)
from torchfleet.ps.server.job.given_tables import GivenTables
from torchfleet.ps.tables.dense_table import STATE_ALONE, WITH_STATE
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.future import Changed, Dense, Future, Pulled, joined_block
from torchfleet.ps.worker.client.joined_requests import JoinedRequests
from torchfleet.ps.worker.client.known_tables import NO_KEYS, KnownTable, KnownTables
from torchfleet.ps.worker.client.shard import Floats, Keys, Shards, as_keys
from torchfleet.ps.worker.client.walks import Walks

_MOST_JOINED = 64  # sets of tables whose requests are prepared
MAX_PULLED = 1 << 26  # bytes of rows in one request; a server replies with at most twice as many


class Client(Walks):
    """Pull and push over `channels`, one per server, in the same order in every client. Belongs to one thread.

    Every call sends one message per server, to all of them before it waits for any. Methods that return a Future do not
    wait; the others do. At most `window` requests per server are in flight: a further one waits for a reply.
    """

    def __init__(self, channels: Sequence[Channel], **options: Any) -> None:
        super().__init__(channels, **options)
        self._tables = KnownTables()
        self._joined: dict[tuple[str, ...], JoinedRequests | None] = {}  # by tables
        self._unawaited: deque[Future[Dense]] = deque()

    def create_table(self, spec: TableSpec) -> None:
        """Create a table on all servers. Idempotent for the same description."""
        shards = [spec.for_shard(server, self.num_servers) for server in range(self.num_servers)]
        self._ask(Command.CREATE_TABLE, [[pack(shard)] for shard in shards]).result()
        self.attach(spec)

    def give_tables(
        self,
        names: Collection[str],
        specs: Sequence[TableSpec],
        layouts: Mapping[str, list[Parameter]],
        dirname: str | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Tell the servers `names`, which were started without a script and do not serve yet, their tables and the
        saved model to load."""
        listed = None if var_names is None else list(var_names)
        waits = []
        for server, connection in enumerate(self._connections):
            if connection.name in names:
                shards = [spec.for_shard(server, self.num_servers) for spec in specs]
                body = GivenTables(shards, dict(layouts), dirname, listed)
                waits.append((connection, connection.submit(Command.TABLES, [pack(body)])))
        Future(waits, lambda replies: None).result()

    def attach(self, spec: TableSpec) -> None:
        """Use a table that another client created."""
        self._tables[spec.name] = KnownTable(spec, self.num_servers)
        self._joined.clear()

    def pull(self, table: str, keys: npt.ArrayLike, create: bool = True) -> Future[Floats]:
        """Rows for `keys`, shape (number of keys, dim), in their order. Keys may repeat. Missing keys are created, or
        with create=False read as zeros.
        """
        return self.pull_tables({table: keys}, create).then(lambda pulled: pulled.rows[table])

    def pull_tables(
        self, keys: Mapping[str, npt.ArrayLike], create: bool = True, in_step: bool = False, foreseen: bool = False
    ) -> Future[Pulled]:
        """Rows of several tables in one message per server, or in several messages if there are too many rows for one.
        `in_step`: the pull belongs to a step that all workers make together. `foreseen`: missing keys read their first
        values, and get no rows; a table that counts pulls counts and creates nevertheless, if `create`.
        """
        flags = VERSIONS | (0 if create else NO_CREATE) | (SYNC if in_step else 0) | (FORESEEN if foreseen else 0)
        joined = self._joined_requests(keys) if len(keys) > FEW_ARRAYS else None
        if joined is not None and (asked := joined.pull(keys)) is not None:
            return self._pull_joined(joined, keys, asked, flags)
        shards: dict[str, Shards] = {}
        num_bytes, counts = 0, False
        for name, wanted in keys.items():
            table = self._tables[name]
            shards[name] = table.shard_keys(wanted)
            num_bytes += 4 * table.dim * shards[name].num_keys
            counts = counts or (create and table.counts_pulls)
        # A pull that counts appearances must be one message: a server counts a key once per message.
        if num_bytes > MAX_PULLED and not counts:
            return self._pull_in_parts(keys, -(-num_bytes // MAX_PULLED), flags)
        return self._pull(shards, flags, once=counts)

    def _joined_requests(self, tables: Iterable[str]) -> JoinedRequests | None:
        """What makes joined requests for these tables; None if their requests are made table by table."""
        names = tuple(tables)
        if names not in self._joined:
            if len(self._joined) >= _MOST_JOINED:  # tables that a model looks up by turns
                self._joined.clear()
            known = [self._tables[name] for name in names]
            is_joined = self.num_servers == 1 and JoinedRequests.suit(known)
            self._joined[names] = JoinedRequests(known) if is_joined else None
        return self._joined[names]

    def _pull_joined(
        self, joined: JoinedRequests, keys: Mapping[str, npt.ArrayLike], asked: JoinedArrays, flags: int
    ) -> Future[Pulled]:
        def finish(replies: list[Sequence[Array]]) -> Pulled:
            found = joined.pulled(asked, replies[0])
            if found is None:
                return self._pulled({name: self._tables[name].shard_keys(own) for name, own in keys.items()}, replies)
            rows, versions = found
            return Pulled(dict(zip(keys, rows, strict=True)), dict(zip(keys, versions, strict=True)))

        return self._ask(Command.PULL, [asked], flags, finish=finish)

    def _pull_in_parts(self, keys: Mapping[str, npt.ArrayLike], num: int, flags: int) -> Future[Pulled]:
        parts = {name: np.array_split(as_keys(wanted), num) for name, wanted in keys.items()}
        shards = [{name: self._tables[name].shard_keys(own[i]) for name, own in parts.items()} for i in range(num)]
        return Future.joined([self._pull(own, flags, once=False) for own in shards], Pulled.joined)

    def _pull(self, shards: Mapping[str, Shards], flags: int, once: bool) -> Future[Pulled]:
        """`once`: a retry of the request must not count its keys again."""
        messages: list[list[Array]] = []
        for server in range(self.num_servers):
            arrays = []
            for name, own in shards.items():
                arrays.append(Array(self._tables[name].number, own.keys[server]))
            messages.append(arrays)

        return self._ask(Command.PULL, messages, flags, once=once, finish=partial(self._pulled, shards))

    def _pulled(self, shards: Mapping[str, Shards], replies: list[Sequence[Array]]) -> Pulled:
        pulled = Pulled({}, {})
        for i, (name, own) in enumerate(shards.items()):
            rows, seen = [], []
            for reply in replies:
                rows.append(reply[i].data)
                seen.append(float(reply[-1].data[i, 0]))
            pulled.rows[name], pulled.versions[name] = self._tables[name].join_rows(own, rows), seen
        return pulled

    def push(self, table: str, keys: npt.ArrayLike, grads: Floats, lr: float | None = None) -> Future[Dense]:
        """One update of a sparse table; `lr` overrides the table's own. Do not change `grads` until the
        future is done.
        """
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
        are_finite: bool = False,
    ) -> Future[Dense]:
        """One update of several tables in one message per server: (keys, rows) for a sparse table, a block for a dense
        one.

        `num_samples`: the number of samples behind the gradients, which weights them in a mean. `settings`: the numbers
        that the flags GATHERED and BOUNDED need. `are_finite`: the caller has checked the gradients for NaN and
        infinity. If nothing waits for a push, the next push or `flush` raises its error. The result holds the dense
        tables' new values if the flag DENSE_BACK asked for them; it is empty if the reply answered a retry.
        """
        while self._unawaited and self._unawaited[0].is_done:
            self._await_oldest()
        messages = self._push_heads(list(grads), rates or {}, versions or {}, num_samples)
        joined = self._joined_requests(grads) if 2 * len(grads) > FEW_ARRAYS else None
        made = None if joined is None else joined.push(grads, messages[0][0].data, settings, are_finite)
        dense = []
        for name, block in grads.items():
            if not isinstance(block, tuple):
                dense.append(name)
            if made is None:
                for message, pair in zip(messages, self._tables[name].shard_gradients(block, are_finite), strict=True):
                    message.extend(pair)
        if settings and made is None:
            for message in messages:
                message.append(Array(0, np.array(settings, np.uint64)))

        def finish(replies: list[Sequence[Array]]) -> Dense:
            return Dense.joined(dense, replies) if flags & DENSE_BACK else Dense()

        sent = messages if made is None else [made]
        future = self._ask(Command.PUSH, sent, flags, once=True, timeout=timeout, finish=finish)
        self._unawaited.append(future)
        return future

    def _push_heads(
        self,
        names: list[str],
        rates: Mapping[str, float],
        versions: Mapping[str, Sequence[float]],
        num_samples: float | None,
    ) -> list[list[Array]]:
        """By server, the first array of a push: for each table the rate, the pulled version, and the
        number of samples.
        """
        for name, rate in rates.items():
            if not 0 <= rate < np.inf:
                raise TableError(f"a learning rate must be a finite number >= 0, found {rate} for table '{name}'")
        heads = []
        for server in range(self.num_servers):
            lines = []
            for name in names:
                line = [rates.get(name, np.nan), versions[name][server] if name in versions else np.nan]
                lines.append(line if num_samples is None else [*line, float(num_samples)])
            heads.append([Array(0, np.array(lines))])
        return heads

    def pull_changed(self, tables: Sequence[str], received: Sequence[int]) -> Future[Changed]:
        """The changes of other workers (geo training): rows of sparse tables, whole dense tables.

        `received`: per server, the number of the last reply that was taken in; zeros at first.
        """
        numbers = [self._tables[name].number for name in tables]
        arrays = [
            [Array(0, np.array([last], np.uint64)), *(Array(number, NO_KEYS) for number in numbers)]
            for last in received
        ]

        def finish(replies: list[Sequence[Array]]) -> Changed:
            rows: dict[str, tuple[Keys, Floats]] = {}
            for i, name in enumerate(tables):
                keys = np.concatenate([reply[1 + 2 * i].data.reshape(-1) for reply in replies])
                rows[name] = keys, np.concatenate([reply[2 + 2 * i].data for reply in replies])
            numbers = [[int(number) for number in reply[0].data.reshape(-1)] for reply in replies]
            return Changed([first for first, _ in numbers], rows, is_all=not any(rest for _, rest in numbers))

        return self._ask(Command.PULL_CHANGED, arrays, finish=finish)

    def pull_dense(self, table: str) -> Future[Floats]:
        """The whole block of a dense table."""
        arrays = self._whole([table])
        return self._ask(Command.PULL, arrays, finish=lambda replies: joined_block(replies, 0))

    def pull_block(self, table: str) -> tuple[Floats, int]:
        """A dense table with its optimizer's state and step count: one row of values, and one for each
        kind of state.
        """
        known = self._tables.dense(table)
        num_rows = 1 + known.spec.num_states
        arrays = [
            [Array(known.number, np.array([0, stop - start, WITH_STATE], np.uint64))] for start, stop in known.ranges
        ]

        def finish(replies: list[Sequence[Array]]) -> tuple[Floats, int]:
            blocks = [reply[0].data.reshape(num_rows, -1) for reply in replies]
            return np.concatenate(blocks, axis=1), max(int(reply[-1].data[0, 0]) for reply in replies)

        asked: Future[tuple[Floats, int]] = self._ask(Command.PULL, arrays, VERSIONS, finish=finish)
        return asked.result()

    def set_block(self, table: str, block: Floats, step: int) -> None:
        """Overwrite a dense table with values and state, as `pull_block` returns them, and set its step count."""
        known = self._tables.dense(table)
        place = Array(known.number, np.array([0, step, WITH_STATE], np.uint64))
        rows = [known.shard_block(row) for row in block]
        shards = [np.concatenate([row[server] for row in rows]) for server in range(self.num_servers)]
        self._ask(Command.SET, [[place, Array(known.number, shard)] for shard in shards], once=True).result()

    def set_block_state(self, table: str, states: Floats, step: int) -> None:
        """As `set_block` for the state alone, one row for each kind. Values stay as they are on the servers."""
        known = self._tables.dense(table)
        place = Array(known.number, np.array([0, step, STATE_ALONE], np.uint64))
        rows = [known.shard_block(row) for row in states]
        shards = [np.concatenate([row[server] for row in rows]) for server in range(self.num_servers)]
        self._ask(Command.SET, [[place, Array(known.number, shard)] for shard in shards], once=True).result()

    def pull_dense_tables(self, tables: Sequence[str], is_bounded: bool = False) -> Future[Dense]:
        """Several whole dense tables with their versions, in one message per server.

        `is_bounded`: this worker will push gradients computed from them, so the servers hold other workers to the
        bound.
        """
        flags = VERSIONS | (BOUNDED if is_bounded else 0)
        return self._ask(Command.PULL, self._whole(tables), flags, finish=lambda replies: Dense.joined(tables, replies))

    def _whole(self, tables: Sequence[str]) -> list[list[Array]]:
        """The arrays that request each server's shards of whole dense tables."""
        known = [self._tables.dense(name) for name in tables]
        messages = []
        for server in range(self.num_servers):
            arrays = []
            for table in known:
                start, stop = table.ranges[server]
                arrays.append(Array(table.number, np.array([0, stop - start], np.uint64)))
            messages.append(arrays)
        return messages

    def push_dense(self, table: str, grads: Floats, lr: float | None = None) -> Future[Dense]:
        """One update of a dense table."""
        return self.push_tables({table: grads}, {} if lr is None else {table: lr})

    def set_dense(self, table: str, values: Floats) -> None:
        """Overwrite a dense table."""
        known = self._tables.dense(table)
        first = Array(known.number, np.zeros(1, np.uint64))
        arrays = [[first, Array(known.number, shard)] for shard in known.shard_block(values)]
        self._ask(Command.SET, arrays, once=True).result()

    def assign(self, table: str, keys: npt.ArrayLike, values: Floats) -> None:
        """Overwrite rows of a sparse table: values, or values and state if `values` is that wide."""
        pairs = self._tables[table].shard_rows(keys, values)
        self._ask(Command.SET, [list(pair) for pair in pairs], once=True).result()

    def pull_rows(self, table: str, keys: npt.ArrayLike) -> Future[tuple[Floats, int]]:
        """(rows with the state of their rule, shape (keys, num_words), the table's largest step). Missing keys are
        created.
        """
        known = self._tables[table]
        shards = known.shard_keys(keys)

        def finish(replies: list[Sequence[Array]]) -> tuple[Floats, int]:
            rows = known.join_rows(shards, [reply[0].data for reply in replies], with_state=True)
            return rows, max(int(reply[-1].data[0, 0]) for reply in replies)

        messages = [[Array(known.number, own)] for own in shards.keys]
        return self._ask(Command.PULL, messages, STATE | VERSIONS, finish=finish)

    def assign_rows(self, table: str, keys: npt.ArrayLike, rows: Floats, step: int) -> Future[None]:
        """Overwrite rows with values and state, as `pull_rows` returns them, and set the table's step."""
        known, last = self._tables[table], Array(0, np.array([step], np.uint64))
        messages = [[*pair, last] for pair in known.shard_rows(keys, rows)]
        return self._ask(Command.SET, messages, STATE, once=True, finish=lambda replies: None)

    def assign_states(self, table: str, keys: npt.ArrayLike, states: Floats, step: int) -> None:
        """Overwrite the state of rows that exist, shape (keys, num_words - dim), and set the table's step. The values
        of rows stay as they are on the servers.
        """
        known, last = self._tables[table], Array(0, np.array([step], np.uint64))
        messages = [[*pair, last] for pair in known.shard_states(keys, states)]
        self._ask(Command.SET, messages, STATE | NO_CREATE, once=True).result()

    def erase(self, table: str, keys: npt.ArrayLike) -> None:
        """Drop rows; keys without a row are ignored."""
        known = self._tables[table]
        arrays = [[Array(known.number, own)] for own in known.shard_keys(keys).keys]
        self._ask(Command.ERASE, arrays, once=True).result()

    def flush(self) -> None:
        """Wait until every push has been applied. Raises the error of any of them."""
        while self._unawaited:
            self._await_oldest()

    def leave(self) -> None:
        """Flush, and tell the servers that this worker has finished."""
        self.flush()
        self._ask(Command.LEAVE).result()

    def _await_oldest(self) -> None:
        oldest = self._unawaited.popleft()
        if not oldest.is_awaited:
            oldest.result()
