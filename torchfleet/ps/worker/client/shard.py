"""Which server owns which key: the keys of a request divided into shards, the same way in every process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import partition, rows
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.spec import TableSpec

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


def as_keys(keys: npt.ArrayLike) -> Keys:
    """Integers of any shape as a flat array of unsigned keys; negative ids keep their 64 bits."""
    array = np.asarray(keys)
    if array.dtype.kind not in "iu" and array.size:
        raise TableError(f"keys must be integers, found {array.dtype}")
    flat = np.ascontiguousarray(array.reshape(-1), array.dtype.newbyteorder("="))
    return flat.view(np.uint64) if flat.dtype.itemsize == 8 else flat.astype(np.int64).view(np.uint64)


@dataclass(slots=True)
class Shards:
    """The keys of one request as shards, each a server's share, one after another. With one server, as they came.

    `starts`: where each shard begins, and the end of the last. `places`: where in the request each of `keys` stood.
    """

    keys: Keys
    starts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64] | None

    def of(self, server: int) -> Keys:
        """A server's shard of the keys."""
        return self.keys[self.starts[server] : self.starts[server + 1]]

    def split_rows(self, values: Floats) -> Floats:
        """Rows in the order of the keys as they came → in the order of `keys`."""
        if self.places is None:
            return values
        out = np.empty_like(values)
        rows.gather(values.reshape(-1), values.shape[1], 0, self.places, out)
        return out

    def rows_of(self, values: Floats, server: int) -> Floats:
        """A server's shard of rows that `split_rows` has put into the order of `keys`."""
        return values[self.starts[server] : self.starts[server + 1]]

    def place(self, server: int, values: Floats, out: Floats) -> None:
        """Write one server's rows where their keys stood in the request."""
        assert self.places is not None
        places = self.places[self.starts[server] : self.starts[server + 1]]
        rows.scatter(out.reshape(-1), out.shape[1], 0, places, values)


def shard(spec: TableSpec, keys: Keys, num_servers: int) -> Shards:
    """Group keys by the server that owns them."""
    if num_servers == 1:
        return Shards(keys, np.array([0, len(keys)]), None)
    owners = owners_of(spec, keys, num_servers)
    starts = np.zeros(num_servers + 1, np.int64)
    grouped, places = np.empty_like(keys), np.empty(len(keys), np.int64)
    partition.group_by_owner(keys, owners, starts, grouped, places)
    return Shards(grouped, starts, places)
