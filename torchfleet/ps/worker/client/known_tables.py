"""The tables that a client knows, and how a request about one is split into shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError, WireError
from torchfleet.ps.kernels.rows import all_finite
from torchfleet.ps.net.wire import Array
from torchfleet.ps.tables.rows.codecs import Dice
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED, is_counted, is_pushed
from torchfleet.ps.tables.rows.wire_rows import WireRows, pulled_rows, pushed_rows
from torchfleet.ps.tables.settings.spec import TableSpec, shard_range
from torchfleet.ps.worker.client.shard import Floats, Shards, as_keys, shard

NO_KEYS = np.empty(0, np.uint64)

Pairs = list[tuple[Array, Array]]  # by server: keys and rows


class KnownTable:
    """The properties of a table that requests need, computed once. Lists that its methods return are by server."""

    def __init__(self, spec: TableSpec, num_servers: int) -> None:
        self.spec, self.number, self.dim, self.is_dense = spec, spec.number, spec.dim, spec.is_dense
        self.counts_pulls = is_counted(spec)  # whether a pull for training changes something on the servers
        self._has_statistics = is_pushed(spec)  # whether gradients may be followed by show, click and slot
        self._num_servers = num_servers
        self._pulled, self._pushed = pulled_rows(spec), pushed_rows(spec)
        self._num_pushes = 0
        # requests for this table may be joined with those for other tables (joined_requests.py)
        self.is_plain = not self.counts_pulls and not self._has_statistics and self._pulled is None is self._pushed
        self.ranges: list[tuple[int, int]] = []  # for a dense table: the elements that each server holds
        if self.is_dense:
            self.ranges = [shard_range(spec.size, server, num_servers) for server in range(num_servers)]

    def shard_keys(self, keys: npt.ArrayLike) -> Shards:
        if self.is_dense:
            name = self.spec.name
            raise TableError(f"table '{name}' is dense and has no keys: use pull_dense, push_dense and set_dense")
        return shard(self.spec, as_keys(keys), self._num_servers)

    def join_rows(self, shards: Shards, replies: list[Floats], with_state: bool = False) -> Floats:
        """Join the servers' rows in the order of the requested keys. `with_state`: the request had the flag STATE."""
        if self._pulled is not None and not with_state:
            counts = [len(keys) for keys in shards.keys]
            replies = [
                self._pulled.decode(rows, num, f"server {server}, table '{self.spec.name}'")
                for server, (num, rows) in enumerate(zip(counts, replies, strict=True))
            ]
        for server, (keys, rows) in enumerate(zip(shards.keys, replies, strict=True)):
            expected = (len(keys), self.spec.num_words if with_state else self.dim)
            if rows.dtype != np.float32 or rows.shape != expected:
                raise WireError(f"server {server} answered with {rows.shape} {rows.dtype}, not {expected} float32")
        return shards.join_rows(replies)

    def shard_rows(self, keys: npt.ArrayLike, values: Floats) -> Pairs:
        """Split rows to assign: values, or values and state."""
        shards, rows, spec = self.shard_keys(keys), _rows(values), self.spec
        widths = (spec.dim, spec.num_words)
        if len(rows) != shards.num_keys or rows.shape[1] not in widths:
            raise TableError(
                f"table '{spec.name}' expects {shards.num_keys} rows of {widths[0]} values (or {widths[1]} with "
                f"state), found {rows.shape}"
            )
        self.check_finite(rows)
        return self._pairs(shards.keys, shards.split_rows(rows))

    def shard_states(self, keys: npt.ArrayLike, states: Floats) -> Pairs:
        """Split the state of rows, without values."""
        shards, rows = self.shard_keys(keys), _rows(states)
        expected = shards.num_keys, self.spec.num_words - self.dim
        if rows.shape != expected:
            raise TableError(f"table '{self.spec.name}' expects state of shape {expected}, found {rows.shape}")
        self.check_finite(rows)
        return self._pairs(shards.keys, shards.split_rows(rows))

    def shard_gradients(self, block: tuple[npt.ArrayLike, Floats] | Floats, are_finite: bool) -> Pairs:
        """Split gradients to push: (keys, rows) of a sparse table, or the block of a dense one."""
        if not isinstance(block, tuple):
            return self._pairs([NO_KEYS] * self._num_servers, self.shard_block(block, are_finite))
        shards, grads = self.shard_keys(block[0]), _rows(block[1])
        is_wide = self._has_statistics and grads.shape[1] == self.dim + NUM_PUSHED
        if grads.shape != (shards.num_keys, self.dim + NUM_PUSHED * is_wide):
            raise TableError(
                f"table '{self.spec.name}' expects gradients of shape ({shards.num_keys}, {self.dim}), "
                f"found {grads.shape}"
            )
        if not are_finite:
            self.check_finite(grads)
        split = shards.split_rows(grads)
        return self._pairs(shards.keys, split if self._pushed is None else self._encoded(self._pushed, shards, split))

    def _encoded(self, pushed: WireRows, shards: Shards, split: list[Floats]) -> list[npt.NDArray[np.uint8]]:
        """Gradients in the type of the table's wire. Random bits follow from key, column and the number of the push, so
        that a job in which workers push in the same order has the same result.
        """
        self._num_pushes += 1
        dice = Dice(np.uint64(self.number), self._num_pushes)
        return [pushed.encode(keys, rows, dice) for keys, rows in zip(shards.keys, split, strict=True)]

    def shard_block(self, values: Floats, are_finite: bool = False) -> list[Floats]:
        """Split the values of a dense table into one range per server."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if not self.is_dense or len(flat) != self.spec.size:
            self.expect_dense()
            raise TableError(f"dense table '{self.spec.name}' has {self.spec.size:,} elements, found {len(flat):,}")
        if not are_finite:
            self.check_finite(flat)
        shards = []
        for start, stop in self.ranges:
            shards.append(flat[start:stop])
        return shards

    def expect_dense(self) -> None:
        if not self.is_dense:
            raise TableError(f"table '{self.spec.name}' has rows and is not dense: use pull, push and assign")

    def check_finite(self, values: Floats) -> None:
        """Raise TableError unless all values are finite. The servers check too, but if one server refused its share,
        others would already have applied theirs.
        """
        if not all_finite(values.reshape(-1).view(np.uint32)):
            raise TableError(
                f"NaN or infinity in the values for table '{self.spec.name}'; nothing was sent. Look for it in the "
                "loss."
            )

    def _pairs(self, keys: Iterable[npt.NDArray[np.uint64]], rows: Iterable[npt.NDArray[Any]]) -> Pairs:
        pairs = []
        for own_keys, own_rows in zip(keys, rows, strict=True):
            pairs.append((Array(self.number, own_keys), Array(self.number, own_rows)))
        return pairs


class KnownTables(dict[str, KnownTable]):
    """Tables by name. An unknown name raises TableError, which lists the known ones."""

    def __missing__(self, name: str) -> KnownTable:
        known = ", ".join(f"'{other}'" for other in sorted(self)) or "none"
        raise TableError(f"no table '{name}' here; known tables: {known}. Use create_table or attach first.")

    def dense(self, name: str) -> KnownTable:
        table = self[name]
        table.expect_dense()
        return table


def _rows(values: Floats) -> Floats:
    rows = np.ascontiguousarray(values, np.float32)
    return rows if rows.ndim == 2 else rows.reshape(len(rows), int(np.prod(rows.shape[1:])))
