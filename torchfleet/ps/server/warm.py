"""What would make first requests slow is done before they come: kernels are compiled or loaded, memory is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numba.core import event

from torchfleet.ps.tables.dense_table import DenseTable
from torchfleet.ps.tables.rows.memory import keep_freed_memory
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.spec import RULES, Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

_BYTES = 1 << 20
COMPILING = "compiling kernels, as at the first start on a machine: a minute or more"


@contextmanager
def telling_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when a kernel is compiled within, once. Kernels that are kept on disk are loaded instead."""

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
    """Use every rule and kind of table once, on a few rows. The buffers of messages stay with the process."""
    keep_freed_memory()
    keys = np.array([1, 2, 1], np.uint64)
    for rule in map(Rule, RULES):
        _warm_rows(TableSpec("warm", dim=2, rule=rule, initializer=Initializer("normal", 0.0, 1.0)), keys)
        dense = DenseTable(TableSpec("warm", "dense", size=2, rule=rule), _BYTES)
        dense.push(np.ones(2, np.float32))
    for is_decoupled in (False, True):
        rule = Rule(weight_decay=0.1, decoupled_decay=is_decoupled)
        _warm_rows(TableSpec("warm", dim=2, rule=rule), keys)
    for name in ("sgd", "adagrad"):  # too wide for a packed map, without and with state
        _warm_rows(TableSpec("warm", dim=16, rule=Rule(name)), keys)
    _warm_rows(TableSpec("warm", "array", dim=2, size=1000), keys)  # without a map
    _warm_policies(keys)


def _warm_rows(spec: TableSpec, keys: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    table, grads = SparseTable(spec, _BYTES), np.ones((3, spec.dim), np.float32)
    table.pull(keys)
    table.push(keys, grads)
    table.assign(keys, grads)
    many = np.arange(1000, dtype=np.uint64)
    table.pull(many)  # grows, so that carrying over is compiled too
    table.push(many, np.ones((1000, spec.dim), np.float32))
    table.erase(keys)
    table.begin_save(is_committed=False)
    table.push(keys, grads)
    for _ in table.chunks(save="delta"):
        pass
    _warm_copy(table)


def _warm_copy(table: SparseTable) -> None:
    """Rows as they come from another server, in memory that nobody may write to."""
    copy = SparseTable(table.spec, _BYTES)
    for saved in table.save_slices("copy", 1000):
        for array in saved.arrays.values():
            array.flags.writeable = False
        copy.load_slice(saved)


def _warm_policies(keys: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    entry = AdmissionEntry(2, 0.999, 1, 1.0, 1, "count > 0", "show", "click", show_click_decay_rate=0.9)
    shrink = Shrink(delete_after_unseen_days=1, max_rows=100)
    table = SparseTable(TableSpec("warm", dim=2, entry=entry, shrink=shrink), _BYTES)
    for _ in range(3):
        table.pull(keys)
        table.push(keys, np.ones((3, 2 + NUM_PUSHED), np.float32))
        table.begin_save(is_committed=False)
    for _ in table.chunks(save="delta"):
        pass
    _warm_copy(table)
    for _ in table.shrink(Shrink(max_rows=1)):
        pass
