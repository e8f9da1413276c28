"""Gives rows of a table's memory back, and removes their entries from the directory. These functions wait for the
device.
"""

from __future__ import annotations

import torch

from torchfleet.ps.gpu.kernels.kernel_choice import Kernels
from torchfleet.ps.gpu.table_memory import (
    EMPTY,
    FRESH,
    LIMIT,
    NUM_FREE,
    NUM_OF_ROWS,
    READY,
    REFUSED,
    TAKEN,
    TableMemory,
    clear_directory,
)


def num_used(memory: TableMemory) -> int:
    """Slots that were ever in use, from 0 on."""
    counters = memory.counters.tolist()
    return int(min(counters[FRESH] + max(0, counters[TAKEN] - counters[NUM_FREE]), counters[LIMIT]))


def slot_of_empty(memory: TableMemory) -> int:
    """The slot of the key that equals EMPTY, or -1."""
    key, slot = memory.directory[memory.num_positions].tolist()
    return -1 if key == EMPTY else int(slot)


def give_back(memory: TableMemory, slots: torch.Tensor) -> None:
    """Add these slots to the list of free ones."""
    used, counters = num_used(memory), memory.counters.tolist()
    free = torch.cat([memory.free[counters[TAKEN] : counters[NUM_FREE]], slots.int()])
    memory.free[: len(free)] = free
    for counter, value in {TAKEN: 0, READY: 0, NUM_FREE: len(free), FRESH: used, REFUSED: 0}.items():
        counters[counter] = value
    memory.counters[:NUM_OF_ROWS] = torch.tensor(counters[:NUM_OF_ROWS])  # another stream may count updates


def rebuild(memory: TableMemory, kernels: Kernels, special: int) -> None:
    """Make the directory anew in its memory: with the entries of `row_keys`, and no others. `special`: the slot of the
    key that equals EMPTY, or -1.
    """
    clear_directory(memory.directory)
    kernels.place(memory, num_used(memory), special)


def erase(memory: TableMemory, kernels: Kernels, slots: torch.Tensor) -> None:
    """Drop the rows of these distinct slots. The whole directory is made anew: faster than a search for each of many
    keys.
    """
    special = slot_of_empty(memory)
    special = -1 if bool((slots == special).any()) else special
    memory.row_keys[slots] = EMPTY
    give_back(memory, slots)
    rebuild(memory, kernels, special)
