"""Uses the kernels of a table on a few rows: trains it, saves it, and copies it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.tables.kinds import make_table
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED, is_pushed
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.tables.table import OneSlice, Table
from torchfleet.ps.tables.table_group import TableGroup

NUM_ROWS = 1000
_BYTES = 1 << 22  # of a copy

Floats = npt.NDArray[np.float32]
Given = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]  # how an array of a request is given to the table


def writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array as in requests from a socket."""
    return array


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array as in requests from a log or in bytes. numba compiles another kernel for read-only arrays."""
    array.flags.writeable = False
    return array


def train(table: Table, given: Given = writable) -> None:
    """Pull and push, as workers do, until the table has grown and moved its rows."""
    if table.spec.is_dense:
        _push(table, given(np.empty(0, np.uint64)), given(np.ones((table.num_rows, 1), np.float32)))
        return
    few = given(np.array([1, 2, 1], np.uint64))
    for _ in range(3):  # an entry policy admits a key after some appearances
        _pull(table, few)
        _push(table, few, _grads(table, 3, given))
    values = given(np.ones((3, table.spec.dim), np.float32))
    table.check_assign(few, values)
    table.assign(few, values)
    if not table.spec.shrink.names:
        many = given(np.arange(NUM_ROWS, dtype=np.uint64))
        _pull(table, many)
        _push(table, many, _grads(table, NUM_ROWS, given))


def train_together() -> None:
    """Pull from two tables of ranges, and push to them, in one call each."""
    specs = [TableSpec(f"warm{i}", "array", dim=2, size=4) for i in range(2)]
    tables = [make_table(spec, _BYTES) for spec in specs]
    for table in tables:
        _pull(table, np.arange(2, dtype=np.uint64))
    group = TableGroup.of(tables)
    assert group is not None
    frame = np.zeros(6, np.uint64)  # the keys 0 and 1, and gradients of zeros
    frame[1] = 1
    address, places, counts = frame.ctypes.data, np.zeros(2, np.int64), np.full(2, 2, np.int64)
    group.read(address, places, counts, np.empty(8, np.float32), np.arange(0, 4, 2))
    update = group.checked(address, places, places + 2, counts, [None, None])
    assert update is not None
    update.apply()


def keep(table: Table, given: Given = writable) -> None:
    """Save, restore, shrink and erase. A dense table needs no kernel for it."""
    if table.spec.is_dense:
        return
    few = given(np.array([1, 2, 1], np.uint64))
    if not table.spec.shrink.names:
        table.erase(few[:1])  # from the map itself; after a save has begun, the table also notes what is gone
    table.begin_save(is_committed=False)
    if table.spec.shrink.names:
        for _ in table.shrink(Shrink(max_rows=1)):
            pass
    else:
        table.erase(few)
    _push(table, few, _grads(table, 3, given))
    for _ in table.save_slices("delta", NUM_ROWS):
        pass
    for each in (writable, read_only):  # rows arrive from another server, or from the log of this one
        _copy(table, each)


def _grads(table: Table, num: int, given: Given) -> Floats:
    return given(np.ones((num, table.spec.dim + (NUM_PUSHED if is_pushed(table.spec) else 0)), np.float32))


def _pull(table: Table, keys: Keys) -> None:
    table.check_pull(keys, True)
    table.pull(keys, True, None)


def _push(table: Table, keys: Keys, grads: Floats) -> None:
    table.check_push(keys, grads, None)
    table.update(keys, grads, None)


def _copy(table: Table, given: Given) -> None:
    copy = make_table(table.spec, _BYTES)
    for saved in table.save_slices("copy", NUM_ROWS):
        for name, array in saved.arrays.items():
            saved.arrays[name] = given(array.copy())
        copy.restore(OneSlice(saved))
