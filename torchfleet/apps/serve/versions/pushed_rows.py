"""Rows and network straight from the servers of a job that trains: all of them once, then what changed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from torchfleet.apps.serve.versions.level_file import Level, TableWriter
from torchfleet.apps.serve.versions.level_stack import LevelStack
from torchfleet.apps.serve.versions.saved_chain import dense_tables
from torchfleet.base.errors import CheckpointError, WireError
from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.settings.spec import Floats, TableSpec, shard_range
from torchfleet.ps.worker.client.subscriber import Changed, ChangedRows, Subscriber

MOST_REPLIES = 200  # most replies of each server in one call of `changes`, which ends when nothing is left to send
PAUSE = 2.0  # pause between two messages of `read_all`, in times that the message took: servers train meanwhile
ASK_EVERY = 20.0  # seconds between requests for changes during `read_all`: servers forget a subscriber that sends none
_MARGIN = 1 << 12  # rows that may be added to a table while it is read, beside an eighth of its rows


class PushedRows:
    """A subscription to all servers of a job. The tables and the network are those of `manifest`, a save of the job.

    FleetError means that servers cannot be reached or refuse; the next call goes on where this one stopped.
    """

    def __init__(self, client: Subscriber, manifest: Manifest, pause: float = PAUSE) -> None:
        self._client, self._pause = client, pause
        self._specs = [table.spec() for table in manifest.tables if not table.is_dense]
        self._dense = [table.spec() for table in dense_tables(manifest)]
        self._blocks: dict[int, Floats] = {}
        for spec in self._dense:
            client.attach(spec)
        self._subscriber, self._received = 0, [0] * client.num_servers
        self._asked = 0.0
        self.answer_seconds = 0.0  # time that the servers took to answer the last call of `changes`
        self._early: list[list[Changed]] = []  # replies that came while all rows were read
        self.created = 0.0
        self.is_lost = True  # the servers do not know the subscription: everything must be read anew

    def read_all(self, stack: LevelStack) -> list[Level]:
        """Levels with all rows of all servers, newest first. Call `changes` next, which makes them exact."""
        self._subscriber, self._received = secrets.randbits(62) + 1, [0] * self._client.num_servers
        self._ask()
        self._early, sizes = [], self._sizes()
        rest: dict[str, list[tuple[Keys, Floats]]] = {}
        with stack.writer() as writer:
            for spec in self._specs:
                most = sizes.get(spec.name, 0)
                most += most // 8 + _MARGIN
                with writer.table(spec.name, spec.dim, most) as table:
                    rest[spec.name] = _fill(table, most, self._paced(spec))
            levels = [writer.finish()]
        if any(rest.values()):
            levels.insert(0, self._level_of_rest(stack, rest))
        for replies in self._early:
            levels.insert(0, self._level(stack, replies))
        for spec in self._dense:
            self._blocks[spec.number] = self._client.pull_dense(spec.name).result()
        self._early, self.is_lost = [], False
        return levels

    def changes(self, stack: LevelStack) -> tuple[list[Level], bool] | None:
        """(levels of what changed, newest first; whether the network changed), up to one moment of each server.

        None if a server does not know this subscription any more: it was restarted, or another replica took over. Then
        `is_lost` is set, and everything must be read anew.
        """
        levels: list[Level] = []
        is_network_new, self.answer_seconds = False, 0.0
        for _ in range(MOST_REPLIES):
            replies = self._ask()
            self.is_lost = True  # until all of it is written: what was received is not sent again
            if not all(reply.body.is_known for reply in replies):
                return None
            if any(reply.rows for reply in replies):
                levels.insert(0, self._level(stack, replies))
            is_network_new |= self._take_blocks(replies)
            if not any(reply.body.rest for reply in replies):
                self.is_lost = False
                return levels, is_network_new
        raise CheckpointError(
            f"the servers change more rows than can be read: after {MOST_REPLIES} replies there are more. Follow the "
            "files of the job instead, or give the follower more of the network."
        )

    def network(self) -> Floats:
        """The values of all dense tables, one behind the other."""
        return np.concatenate([np.empty(0, np.float32), *(self._blocks[spec.number] for spec in self._dense)])

    def _ask(self) -> list[Changed]:
        began = time.monotonic()
        replies = self._client.changed(self._subscriber, self._received)
        self._asked = time.monotonic()
        self.answer_seconds += self._asked - began
        self._received = [reply.body.number for reply in replies]
        self.created = max(self.created, *(reply.body.changed_at for reply in replies))
        return replies

    def _level(self, stack: LevelStack, replies: Sequence[Changed]) -> Level:
        with stack.writer() as writer:
            for spec in self._specs:
                found = [reply.rows[spec.number] for reply in replies if spec.number in reply.rows]
                _check(spec, found)
                with writer.table(spec.name, spec.dim, sum(len(each.keys) + len(each.gone) for each in found)) as table:
                    for each in found:
                        table.add(each.keys, each.values)
                    for each in found:
                        table.add_gone(each.gone)
            return writer.finish()

    def _take_blocks(self, replies: Sequence[Changed]) -> bool:
        is_new = False
        for server, reply in enumerate(replies):
            for spec in self._dense:
                if spec.number in reply.blocks:
                    self._put_block(spec, server, reply.blocks[spec.number])
                    is_new = True
        return is_new

    def _put_block(self, spec: TableSpec, server: int, block: Floats) -> None:
        start, stop = shard_range(spec.size, server, self._client.num_servers)
        if len(block) != stop - start:
            raise WireError(f"'{spec.name}': expected {stop - start:,} numbers of server {server}, found {len(block)}")
        self._blocks[spec.number][start:stop] = block

    def _level_of_rest(self, stack: LevelStack, rest: Mapping[str, list[tuple[Keys, Floats]]]) -> Level:
        with stack.writer() as writer:
            for spec in self._specs:
                chunks = rest[spec.name]
                with writer.table(spec.name, spec.dim, sum(len(keys) for keys, _ in chunks)) as table:
                    for keys, values in chunks:
                        table.add(keys, values)
            return writer.finish()

    def _sizes(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for server in self._client.stats():
            for name, table in server["tables"].items():
                found[name] = found.get(name, 0) + int(table["rows"])
        return found

    def _paced(self, spec: TableSpec) -> Iterator[tuple[Keys, Floats]]:
        """All rows of a table, with pauses in which the servers train."""
        began = time.monotonic()
        for keys, values in self._client.walk(spec):
            _check(spec, [ChangedRows(keys, values, keys[:0])])
            yield np.array(keys), np.array(values)
            time.sleep(min(1.0, self._pause * (time.monotonic() - began)))
            began = time.monotonic()
            if began - self._asked > ASK_EVERY:
                self._early.append(self._ask())


def _fill(table: TableWriter, most: int, chunks: Iterator[tuple[Keys, Floats]]) -> list[tuple[Keys, Floats]]:
    """Add rows, at most `most`; returns the rest."""
    num, rest = 0, []
    for keys, values in chunks:
        if num + len(keys) <= most:
            table.add(keys, values)
            num += len(keys)
        else:
            rest.append((keys, values))
    return rest


def _check(spec: TableSpec, found: Sequence[ChangedRows]) -> None:
    for each in found:
        if each.values.shape[1:] != (spec.dim,):
            raise WireError(f"table '{spec.name}': expected rows of {spec.dim} numbers, found {each.values.shape}")
