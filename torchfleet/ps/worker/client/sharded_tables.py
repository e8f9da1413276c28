"""The tables that a client knows, and what a request about one of them holds for each server: a shard."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError, WireError
from torchfleet.ps.kernels.rows import all_finite
from torchfleet.ps.net.wire import Array
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED, is_counted, is_pushed
from torchfleet.ps.tables.settings.spec import TableSpec, shard_range
from torchfleet.ps.worker.client.shard import Floats, Shards, as_keys, shard

NO_KEYS = np.empty(0, np.uint64)
MAX_PULLED = 1 << 26  # bytes of rows in one request; a server answers with at most twice as many

Pairs = list[tuple[Array, Array]]  # by server: keys and rows


class ShardedTables:
    """Descriptions of tables by name. What its methods return in lists is by server."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self.specs: dict[str, TableSpec] = {}
        # Found out once and not at every request: it takes a look at every policy of the table.
        self.counted: dict[str, bool] = {}  # whether a pull for training changes something on the servers
        self._wide: dict[str, bool] = {}  # whether gradients may have show, click and slot behind them

    def attach(self, spec: TableSpec) -> None:
        self.specs[spec.name] = spec
        self.counted[spec.name], self._wide[spec.name] = is_counted(spec), is_pushed(spec)

    def spec(self, table: str) -> TableSpec:
        spec = self.specs.get(table)
        if spec is None:
            known = ", ".join(f"'{name}'" for name in sorted(self.specs)) or "none"
            raise TableError(f"no table '{table}' here; known tables: {known}. Use create_table or attach first.")
        return spec

    def dense_spec(self, table: str) -> TableSpec:
        spec = self.spec(table)
        if not spec.is_dense:
            raise TableError(f"table '{table}' has rows and is not dense: use pull, push and assign")
        return spec

    def shard_keys(self, table: str, keys: npt.ArrayLike) -> Shards:
        spec = self.spec(table)
        if spec.is_dense:
            raise TableError(f"table '{table}' is dense and has no keys: use pull_dense, push_dense and set_dense")
        return shard(spec, as_keys(keys), self._num_servers)

    def parts_of(self, keys: Mapping[str, npt.ArrayLike], create: bool) -> list[Mapping[str, npt.ArrayLike]]:
        """The keys of a pull in as many parts as it takes to keep replies short. A pull that counts appearances is one:
        it counts a key once, however often it is in it."""
        num_bytes = sum(4 * np.size(wanted) * self.spec(name).dim for name, wanted in keys.items())
        if num_bytes <= MAX_PULLED or (create and any(self.counted[name] for name in keys)):
            return [keys]
        num = -(-num_bytes // MAX_PULLED)
        flat = {name: as_keys(wanted) for name, wanted in keys.items()}
        return [{name: np.array_split(wanted, num)[i] for name, wanted in flat.items()} for i in range(num)]

    def gather_rows(self, table: str, shards: Shards, replies: list[Floats]) -> Floats:
        """The servers' rows, in the order of the keys as they came."""
        dim = self.specs[table].dim
        for server, rows in enumerate(replies):
            expected = (len(shards.of(server)), dim)
            if rows.dtype != np.float32 or rows.shape != expected:
                raise WireError(f"server {server} answered with {rows.shape} {rows.dtype}, not {expected} float32")
        if shards.places is None:
            return replies[0]
        out = np.empty((len(shards.keys), dim), np.float32)
        for server, rows in enumerate(replies):
            shards.place(server, rows, out)
        return out

    def shard_rows(self, table: str, keys: npt.ArrayLike, values: Floats) -> Pairs:
        """Rows to be set: values, or values and state."""
        shards, rows, spec = self.shard_keys(table, keys), _rows(values), self.spec(table)
        widths = (spec.dim, spec.dim * (1 + spec.num_states))
        if len(rows) != len(shards.keys) or rows.shape[1] not in widths:
            raise TableError(
                f"table '{table}' expects {len(shards.keys)} rows of {widths[0]} values (or {widths[1]} with state), "
                f"found {rows.shape}"
            )
        if not all_finite(rows.reshape(-1).view(np.uint32)):
            raise TableError(f"NaN or infinity in the values for table '{table}'; nothing was sent")
        return self._pairs(spec, shards, rows)

    def shard_gradients(self, table: str, block: tuple[npt.ArrayLike, Floats] | Floats) -> Pairs:
        """Gradients to be pushed: (keys, rows) of a sparse table, or the block of a dense one."""
        spec = self.spec(table)
        if not isinstance(block, tuple):
            no_keys = Array(spec.number, NO_KEYS)
            return [(no_keys, Array(spec.number, values)) for values in self.shard_block(table, block)]
        shards, grads = self.shard_keys(table, block[0]), _rows(block[1])
        is_wide = self._wide[table] and grads.shape[1] == spec.dim + NUM_PUSHED
        if grads.shape != (len(shards.keys), spec.dim + NUM_PUSHED * is_wide):
            raise TableError(
                f"table '{table}' expects gradients of shape ({len(shards.keys)}, {spec.dim}), found {grads.shape}"
            )
        # Checked here as well as on the servers: what one of them refuses, none of them may apply.
        if not all_finite(grads.reshape(-1).view(np.uint32)):
            raise TableError(
                f"NaN or infinity in the gradients for table '{table}'; nothing was sent. Look for it in the loss."
            )
        return self._pairs(spec, shards, grads)

    def shard_block(self, table: str, values: Floats) -> list[Floats]:
        """The values of a dense table, cut into one range per server."""
        spec = self.dense_spec(table)
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if len(flat) != spec.size:
            raise TableError(f"dense table '{table}' has {spec.size:,} elements, found {len(flat):,}")
        if not all_finite(flat.view(np.uint32)):
            raise TableError(
                f"NaN or infinity in the values for table '{table}'; nothing was sent. Look for it in the loss."
            )
        servers = range(self._num_servers)
        return [flat[slice(*shard_range(spec.size, server, self._num_servers))] for server in servers]

    def _pairs(self, spec: TableSpec, shards: Shards, rows: Floats) -> Pairs:
        grouped = shards.split_rows(rows)
        return [
            (Array(spec.number, shards.of(server)), Array(spec.number, shards.rows_of(grouped, server)))
            for server in range(self._num_servers)
        ]


def _rows(values: Floats) -> Floats:
    rows = np.ascontiguousarray(values, np.float32)
    return rows if rows.ndim == 2 else rows.reshape(len(rows), int(np.prod(rows.shape[1:])))
