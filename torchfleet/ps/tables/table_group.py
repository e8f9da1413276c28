"""Groups of `array` tables with rows of float32, which a request reads in one call of a kernel, and updates in one if
they have the same rule.

The results are those of the tables' own methods. What needs more than a kernel (a new row, a key that repeats, an
error) is left to these methods: then the group's method returns False or None, and no row has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import table_groups
from torchfleet.ps.kernels.merge import SALT
from torchfleet.ps.tables.rows.keymap import FEWEST_SHARED
from torchfleet.ps.tables.rows.keyrange import KeyRange
from torchfleet.ps.tables.settings.rule import learning_rate
from torchfleet.ps.tables.settings.spec import Floats
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.tables.table import Table

MOST_KEYS = 2 * FEWEST_SHARED - 1  # of one table; several threads share the work on more

Places = npt.NDArray[np.int64]


class TableGroup:
    """Several distinct tables."""

    def __init__(self, tables: Sequence[SparseTable]) -> None:
        """`tables`: those for which `may_join` holds."""
        self.tables = list(tables)
        ranges = [_range_of(table) for table in tables]
        self._kept = [(index.store, index.marks) for index in ranges]  # kept alive: the kernels use their addresses
        described = [
            (store.ctypes.data, marks.ctypes.data, index.size, index.width, table.spec.dim)
            for (store, marks), index, table in zip(self._kept, ranges, self.tables, strict=True)
        ]
        self._described = np.array(described, np.int64)
        self.dims: Places = self._described[:, table_groups.DIM].copy()
        self._shard, self._num_shards = np.uint64(ranges[0].shard), np.uint64(ranges[0].num_shards)
        self._places = np.empty(1 << (2 * MOST_KEYS).bit_length(), np.int32)
        rule = self.tables[0].spec.rule
        is_one_rule = all(_without_rate(table) == _without_rate(self.tables[0]) for table in tables)
        self._kernel = rule.row_rule.group_kernel(rule) if is_one_rule else None
        self._settings = np.array([rule.eps, rule.beta1, rule.beta2, rule.low, rule.high])

    @classmethod
    def of(cls, tables: Sequence[Table]) -> TableGroup | None:
        """A group of these tables; None if they cannot form one."""
        own = [table for table in tables if isinstance(table, SparseTable) and may_join(table)]
        if len(own) < len(tables) or len(own) < 2 or len({id(table) for table in own}) < len(own):
            return None
        shards = {(index.shard, index.num_shards) for index in map(_range_of, own)}
        return cls(own) if len(shards) == 1 else None

    def read(self, frame: int, keys: Places, counts: Places, out: Floats, outs: Places) -> bool:
        """Write the values of all rows to `out`: those of table t from number 2 * outs[t] on. Returns False if the
        tables' own methods must do it.

        `frame`: the address of the request's 64-bit words; the first key of table t is word keys[t].
        """
        most = int(counts.max(initial=0))
        if most > MOST_KEYS:
            return False
        rows = np.empty(most, np.int64)
        how = self._described, self._shard, self._num_shards, rows
        return bool(table_groups.read_tables(frame, keys, counts, *how, out, outs))

    def checked(
        self, frame: int, keys: Places, grads: Places, counts: Places, rates: Sequence[float | None]
    ) -> GroupUpdate | None:
        """An update of all tables that is checked as by `check_push` of each; None if the tables' own methods must do
        it. `rates`: by table; None: the table's own.
        """
        if self._kernel is None or counts.max(initial=0) > MOST_KEYS:
            return None
        rows, largest = np.empty(int(counts.sum()), np.int64), np.empty(len(self.tables))
        places = self._places[: 1 << max(4, int(2 * counts.max(initial=1) - 1).bit_length())]
        how = self._described, self._shard, self._num_shards, places, SALT, rows, largest
        if not table_groups.check_tables(frame, keys, grads, counts, *how):
            return None
        found = []
        for table, asked, most, num in zip(self.tables, rates, largest.tolist(), counts.tolist(), strict=True):
            step = table.step + 1
            rate = learning_rate(table.spec.rule, asked, step)
            if not most < np.inf or not table.bounds.allow_update(rate, step, most * num):
                return None
            found.append(rate)
        return GroupUpdate(self, frame, grads, counts, rows, np.array(found))

    def apply(self, update: GroupUpdate) -> None:
        """Apply a checked update; nothing may be done to the tables in between."""
        steps = []
        for table in self.tables:
            table.step += 1
            steps.append(table.step)
        how = self._described, update.rows, update.rates, np.array(steps, np.int64), self._settings
        table_groups.update_tables(self._kernel, update.frame, update.grads, update.counts, *how)
        if any(table.tracking is not None or table.watch is not None for table in self.tables):
            self._tell(update)

    def _tell(self, update: GroupUpdate) -> None:
        first = 0
        for table, num in zip(self.tables, update.counts.tolist(), strict=True):
            table.note_updated(update.rows[first : first + num])
            first += num


class GroupUpdate:
    """A checked update of a group. The caller keeps the memory at `frame`."""

    def __init__(
        self, group: TableGroup, frame: int, grads: Places, counts: Places, rows: Places, rates: npt.NDArray[np.float64]
    ) -> None:
        self._group, self.frame, self.grads = group, frame, grads
        self.counts, self.rows, self.rates = counts, rows, rates

    def apply(self) -> None:
        self._group.apply(self)


def may_join(table: SparseTable) -> bool:
    """Whether a table can be part of a group."""
    return (
        type(table) is SparseTable
        and isinstance(table.index, KeyRange)
        and table.form.narrow is None
        and table.statistics is None
        and table.is_open
        and table.pushed_rows is None
        and not table.spec.rule.weight_decay
    )


def _range_of(table: SparseTable) -> KeyRange:
    assert isinstance(table.index, KeyRange)
    return table.index


def _without_rate(table: SparseTable) -> Any:
    rule = table.spec.rule
    return rule.name, rule.eps, rule.beta1, rule.beta2, rule.lr_decay, rule.momentum, rule.low, rule.high, rule.options
