"""Which server owns which key: splits the keys of a request into shards, the same way in every process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import partition, rows
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.spec import TableSpec

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


def as_keys(keys: npt.ArrayLike) -> Keys:
    """Integers of any shape as a flat array of unsigned keys; negative ids keep their 64 bits."""
    if isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.flags.c_contiguous:
        if keys.dtype == np.uint64:
            return keys
        if keys.dtype == np.int64:
            return keys.view(np.uint64)
    array = np.asarray(keys)
    if array.dtype.kind not in "iu" and array.size:
        raise TableError(f"keys must be integers, found {array.dtype}")
    flat = np.ascontiguousarray(array.reshape(-1), array.dtype.newbyteorder("="))
    return flat.view(np.uint64) if flat.dtype.itemsize == 8 else flat.astype(np.int64).view(np.uint64)


@dataclass(slots=True)
class Shards:
    """The keys of one request, by server.

    `places`: by server, the positions of its keys in the request; None with a single server.
    """

    num_keys: int
    keys: list[Keys]
    places: list[Places] | None = None

    def split_rows(self, values: Floats) -> list[Floats]:
        """Split rows, given in the order of the request, by server. Each server's rows are in the order of its keys."""
        if self.places is None:
            return [values]
        out, start = np.empty_like(values), 0
        split = []
        for places in self.places:
            own = out[start : start + len(places)]
            rows.gather(values.reshape(-1), values.shape[1], 0, places, own)
            split.append(own)
            start += len(places)
        return split

    def join_rows(self, replies: list[Floats]) -> Floats:
        """Join the servers' rows in the order of the request."""
        if self.places is None:
            return replies[0]
        joined = np.empty((self.num_keys, replies[0].shape[1]), np.float32)
        for places, values in zip(self.places, replies, strict=True):
            rows.scatter(joined.reshape(-1), joined.shape[1], 0, places, values)
        return joined


def shard(spec: TableSpec, keys: Keys, num_servers: int) -> Shards:
    """Group keys by the server that owns them."""
    if num_servers == 1:
        return Shards(len(keys), [keys])
    owners = owners_of(spec, keys, num_servers)
    starts = np.zeros(num_servers + 1, np.int64)
    grouped, places = np.empty_like(keys), np.empty(len(keys), np.int64)
    partition.group_by_owner(keys, owners, starts, grouped, places)
    ranges = list(itertools.pairwise(starts.tolist()))
    return Shards(len(keys), [grouped[i:j] for i, j in ranges], [places[i:j] for i, j in ranges])
