"""Have every kernel compiled, or loaded from numba's cache, before the first request comes."""

from __future__ import annotations

import numpy as np

from torchfleet.tables.dense import DenseTable
from torchfleet.tables.sparse import SparseTable
from torchfleet.tables.spec import Initializer, Rule, TableSpec

_BYTES = 1 << 20


def warm_up() -> None:
    keys = np.array([1, 2, 1], np.uint64)
    grads = np.ones((3, 2), np.float32)
    for rule in (Rule("sgd"), Rule("adagrad"), Rule("adam")):
        sparse = SparseTable(TableSpec("warm", dim=2, rule=rule, initializer=Initializer("normal", 0.0, 1.0)), _BYTES)
        sparse.pull(keys)
        sparse.push(keys, grads)
        dense = DenseTable(TableSpec("warm", "dense", size=2, rule=rule), _BYTES)
        dense.push(np.ones(2, np.float32))
    sparse.assign(keys, grads)
    sparse.pull(np.arange(1000, dtype=np.uint64))  # grows, so that carrying over is compiled too
    sparse.erase(keys)
