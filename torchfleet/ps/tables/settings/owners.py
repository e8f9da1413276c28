"""Which shard of a table owns a key: the same rule in clients, servers and saved models."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import partition
from torchfleet.ps.tables.settings.spec import TableSpec


def owners_of(spec: TableSpec, keys: npt.NDArray[np.uint64], num_shards: int) -> npt.NDArray[np.int32]:
    """The number of the shard that owns each key: by hash, or round-robin for declared ids."""
    owners = np.empty(len(keys), np.int32)
    if spec.has_size:
        owners[:] = keys % np.uint64(num_shards)
    else:
        partition.owners_by_hash(keys, num_shards, owners)
    return owners
