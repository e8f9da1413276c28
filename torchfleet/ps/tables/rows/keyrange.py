"""Ids 0..size-1 without a map: ids are assigned to servers round-robin, and the row number follows from the id."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.partition import all_below, all_of_shard, rows_in_use
from torchfleet.ps.tables.rows.keymap import Keys, Rows
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.settings.table_size import HOW_TO_SET


def check_range(keys: Keys, size: int, whose: str) -> None:
    """Raise TableError, naming the first wrong id as the user gave it, unless all ids are in 0..size-1."""
    if not all_below(keys, np.uint64(size)):
        found = keys[keys >= np.uint64(size)].view(np.int64)  # signed, as the user gave them
        others = f" and {len(found) - 1:,} more like it" if len(found) > 1 else ""
        raise TableError(
            f"{whose}: ids must be 0 to {size - 1:,}, as its declared size (num_embeddings) is {size:,}; found "
            f"{found[0]}{others}. Correct the ids, or declare a larger size. A table without one takes any 64-bit id."
        )


class KeyRange:
    """The contract of KeyMap, for the ids shard, shard + num_shards, ... below size; row = id // num_shards."""

    offset = 0

    def __init__(self, table: str, num_words: int, max_bytes: int, size: int, shard: int, num_shards: int) -> None:
        self.width = num_words
        self._table = table
        self.size, self.shard, self.num_shards = size, shard, num_shards
        self.num_row_numbers = max(0, -(-(size - shard) // num_shards))
        self.max_rows = self.num_row_numbers
        if self.num_row_numbers * num_words * 4 > max_bytes:
            raise TableError(
                f"{self.num_row_numbers:,} rows of {4 * num_words} bytes do not fit max_table_bytes = {max_bytes:,}. "
                f"Raise it ({HOW_TO_SET}), or use more servers."
            )
        self._memory = Memory(4 * num_words * self.num_row_numbers)
        self.store: npt.NDArray[np.float32] = self._memory.array(np.float32)
        # by row number: whether it is in use
        self.marks: npt.NDArray[np.bool_] = Memory(self.num_row_numbers).array(np.bool_)[: self.num_row_numbers]
        self.num_keys = 0

    @property
    def load_factor(self) -> float:
        return self.num_keys / max(1, self.num_row_numbers)

    @property
    def num_free_rows(self) -> int:
        return self.num_row_numbers - self.num_keys

    def reserve_for(self, keys: Keys) -> None:
        """As KeyMap.reserve_for. Does nothing: every id has its row."""

    def settle(self) -> bool:
        """As KeyMap.settle. Always False: nothing is ever moved."""
        return False

    def reserve(self, num: int) -> None:
        """As KeyMap.reserve. Does nothing: every id has its row."""

    reserve_at_once = reserve

    def load(self, keys: Keys, rows: npt.NDArray[np.float32]) -> bool:
        """As KeyMap.load. Always False: there is no faster way than the usual one."""
        return False

    @property
    def num_bytes(self) -> int:
        return self.num_keys * self.width * 4 + self.num_row_numbers

    def check(self, keys: Keys) -> None:
        """Raise TableError unless every key is below size and belongs to this server."""
        if not len(keys):
            return
        check_range(keys, self.size, f"table '{self._table}'")
        if self.num_shards > 1 and not all_of_shard(keys, np.uint64(self.shard), np.uint64(self.num_shards)):
            raise TableError(
                f"table '{self._table}': this server owns the ids with id % {self.num_shards} == {self.shard}; found "
                "other ids. All clients must use the same list of servers, in the same order."
            )

    def find(self, keys: Keys, rows: Rows, num_words: int) -> int:
        return int(rows_in_use(keys, np.uint64(self.num_shards), self.marks, rows))

    def insert_missing(self, keys: Keys, rows: Rows) -> Rows:
        rows[:] = keys // np.uint64(self.num_shards)
        fresh = np.flatnonzero(~self.marks[rows])
        fresh = fresh[np.unique(rows[fresh], return_index=True)[1]]
        self.marks[rows[fresh]] = True
        self.num_keys += len(fresh)
        return fresh.astype(np.int64)

    def erase(self, keys: Keys) -> int:
        rows = np.unique((keys // np.uint64(self.num_shards)).astype(np.int64))
        num = int(self.marks[rows].sum())
        self.marks[rows] = False
        self.num_keys -= num
        return num

    def alive(self, rows: Rows) -> tuple[Keys, Rows]:
        rows = rows[self.marks[rows]]
        return (rows * self.num_shards + self.shard).astype(np.uint64), rows
