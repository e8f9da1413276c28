"""Warms a server up, so that its first requests are not slow: compiles or loads the kernels, and keeps freed memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numba.core import event

from torchfleet.ps.tables.kinds import make_table, samples
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.rows.memory import keep_freed_memory
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED, is_pushed
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import KINDS
from torchfleet.ps.tables.table import OneSlice, Table

_BYTES = 1 << 20
COMPILING = "compiling kernels, as at the first start on a machine: a minute or more"


@contextmanager
def telling_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` once if a kernel is compiled in this context. Kernels from the cache on disk are not compiled."""

    class Once(event.Listener):  # type: ignore[misc]
        is_told = False

        def on_start(self, found: event.Event) -> None:
            if not self.is_told:
                self.is_told = True
                tell()

        def on_end(self, found: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", Once()):
        yield


def warm_up() -> None:
    """Use every sample table of every kind once, on a few rows. Also makes the process keep freed memory, which the
    buffers of messages reuse."""
    keep_freed_memory()
    for kind in KINDS:
        for spec in samples(kind):
            table = make_table(spec, _BYTES)
            (_warm_block if spec.is_dense else _warm_rows)(table)


def _warm_block(table: Table) -> None:
    _push(table, np.empty(0, np.uint64), np.ones((table.num_rows, 1), np.float32))


def _warm_rows(table: Table) -> None:
    spec, few, many = table.spec, np.array([1, 2, 1], np.uint64), np.arange(1000, dtype=np.uint64)
    width = spec.dim + (NUM_PUSHED if is_pushed(spec) else 0)
    for _ in range(3):  # an entry policy admits a key after some appearances
        _pull(table, few)
        _push(table, few, np.ones((3, width), np.float32))
        table.begin_save(is_committed=False)
    table.check_assign(few, np.ones((3, spec.dim), np.float32))
    table.assign(few, np.ones((3, spec.dim), np.float32))
    if spec.shrink.names:
        for _ in table.shrink(Shrink(max_rows=1)):
            pass
    else:
        _pull(table, many)  # the table grows, so that moving its rows is compiled too
        _push(table, many, np.ones((1000, width), np.float32))
        table.erase(few)
    _push(table, few, np.ones((3, width), np.float32))
    for _ in table.save_slices("delta", 1000):
        pass
    _warm_copy(table)


def _pull(table: Table, keys: Keys) -> None:
    table.check_pull(keys, True)
    table.pull(keys, True, None)


def _push(table: Table, keys: Keys, grads: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    table.check_push(keys, grads, None)
    table.update(keys, grads, None)


def _warm_copy(table: Table) -> None:
    """Restore rows from read-only memory, as they arrive from another server."""
    copy = make_table(table.spec, _BYTES)
    for saved in table.save_slices("copy", 1000):
        for array in saved.arrays.values():
            array.flags.writeable = False
        copy.restore(OneSlice(saved))
