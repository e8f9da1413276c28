"""The memory of a table on a device: what the kernels read and write.

The directory is an array of entries (key, slot) with open addressing: a key stands at the position that its hash gives,
or at the next one that was free. A slot is the number of a row. Behind the positions stand two entries for the keys
whose values mark empty and removed entries, and entries that stay empty: Triton's compare-and-swap has no mask, and a
lane that has nothing to insert exchanges nothing there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from torchfleet.ps.gpu.integers import mix, shift_right, signed
from torchfleet.ps.gpu.row_memory import RowMemory

EMPTY = -(1 << 63)  # the key of an entry that was never used
REMOVED = EMPTY + 1  # the key of an entry whose row was removed: a search goes on behind it
ABSENT = -1  # the slot of a key that has no row
PENDING = -2  # in the directory: the slot of an entry while a kernel inserts it
NO_ROW = -2  # what a lookup returns for a new key when no row was left; it reads NaN
MAX_SLOTS = 1 << 30  # slots and positions are 32-bit numbers
SPARE = 1.5  # directory entries per row
NUM_IDLE = 1024  # entries that stay empty
NUM_BEHIND = 2 + NUM_IDLE  # entries behind the positions

# Counters in device memory, which kernels read and advance without the host
TAKEN = 0  # rows given to keys since the list of free rows was made
NUM_FREE = 1  # rows in that list, which are given first
FRESH = 2  # the first row that no key has ever had, when that list was made
LIMIT = 3  # rows that exist
REFUSED = 4  # keys that got no row, because no row was left
READY = 5  # of the rows taken, those that have their first values
NUM_OF_ROWS = 6  # the counters above, which are about rows
STEP = 6  # updates so far
OUTSIDE = 7  # ids that were looked up and are not below the table's declared size
NUM_COUNTERS = 8


@dataclass
class TableMemory:
    """All tensors of a table. `rows` has words [value | optimizer state | statistics | padding]."""

    directory: torch.Tensor  # (positions + NUM_BEHIND, 2) int64: key, slot
    counters: torch.Tensor  # int64
    row_keys: torch.Tensor  # int64, by slot; EMPTY for a slot without a row
    free: torch.Tensor  # int32: slots to give out again
    rows: RowMemory
    rates: torch.Tensor  # two float32: of the update under way
    secret: int  # makes positions unpredictable, so that a user cannot choose keys that collide
    num_replaced: int = 0  # how often tensors were replaced by larger ones

    @property
    def num_positions(self) -> int:
        return len(self.directory) - NUM_BEHIND

    @property
    def num_bytes(self) -> int:
        others = self.directory, self.counters, self.row_keys, self.free
        return self.rows.num_bytes + sum(tensor.nbytes for tensor in others)


def new_secret() -> int:
    return signed(int.from_bytes(os.urandom(8), "little"))


def empty_directory(num_rows: int, device: torch.device) -> torch.Tensor:
    """A directory for `num_rows` rows."""
    directory = torch.empty(int(num_rows * SPARE) + NUM_BEHIND, 2, dtype=torch.int64, device=device)
    clear_directory(directory)
    return directory


def clear_directory(directory: torch.Tensor) -> None:
    directory[:, 0] = EMPTY
    directory[:, 1] = PENDING


def first_positions(keys: torch.Tensor, secret: int, num_positions: int) -> torch.Tensor:
    """Where the search for a key begins."""
    at = (shift_right(mix(keys ^ secret), 32) * num_positions) >> 32
    at = torch.where(keys == EMPTY, num_positions, at)
    return torch.where(keys == REMOVED, num_positions + 1, at)


def stored_keys(keys: torch.Tensor) -> torch.Tensor:
    """Keys as the directory holds them. The keys that equal EMPTY or REMOVED become another number: they have entries
    of their own.
    """
    return torch.where(keys <= REMOVED, 0, keys)


def new_memory(width: int, capacity: int, device: torch.device, is_fixed: bool = False) -> TableMemory:
    """The memory of an empty table. `is_fixed`: exactly `capacity` rows, which never become more."""
    rows = RowMemory(width, capacity, device, is_fixed)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
    counters[LIMIT] = rows.num_rows
    return TableMemory(
        directory=empty_directory(rows.num_rows, device),
        counters=counters,
        row_keys=torch.full((rows.num_rows,), EMPTY, dtype=torch.int64, device=device),
        free=torch.zeros(rows.num_rows, dtype=torch.int32, device=device),
        rows=rows,
        rates=torch.zeros(2, dtype=torch.float32, device=device),
        secret=new_secret(),
    )
