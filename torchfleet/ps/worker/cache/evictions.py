"""The rows that a cache has evicted: the last eviction of each key, and the values until the servers have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchfleet.ps.worker.cache.evicted_keys import NEVER, EvictedKeys
from torchfleet.ps.worker.cache.write_back import Write

Keys = np.ndarray[Any, np.dtype[np.int64]]
Rows = np.ndarray[Any, np.dtype[np.float32]]
Places = np.ndarray[Any, np.dtype[np.intp]]


class Evictions:
    """Counts evictions, and holds the writes of their rows until the servers have answered them.

    The servers get writes in order. A row that no open write holds is therefore on the servers as it was last dropped;
    a row in open writes is taken from the newest of them, without a wait for the servers.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num = 0
        self._marks = EvictedKeys(num_slots, device)
        self._open: list[Write] = []  # oldest first
        self._last_write: dict[int, Write] = {}  # by an eviction's number: its own, or the newest before it

    def add(self, keys: torch.Tensor, write: Write | None) -> None:
        """Note that these keys are dropped. `write` has the rows among theirs that had changed; None if no row had."""
        self._num += 1
        number = EvictedKeys.number(self._num)
        self._marks.add(keys, number)
        if write is not None:
            self._open.append(write)
        if self._open:  # numbers are used in turns: rows of an earlier eviction of this number are in earlier writes
            self._last_write[number] = self._open[-1]

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """The number of the last eviction of each key (uint8); NEVER for a key that was never evicted."""
        return self._marks.find(keys)

    def settle(self, wait: Callable[[Write], None]) -> None:
        """Wait until the servers have all rows."""
        for write in self._open:
            wait(write)

    def on_their_way(self, keys: Keys, numbers: Keys) -> tuple[Places, Rows | None]:
        """Search the open writes for these keys. Returns (the indices of the keys that were found, their rows); the
        rows are None if no key was found. `numbers`: what `find` returned for the keys.
        """
        self._open = [write for write in self._open if not write.is_done.is_set()]
        self._last_write = {n: write for n, write in self._last_write.items() if not write.is_done.is_set()}
        places = np.flatnonzero((numbers != NEVER) & np.isin(numbers, list(self._last_write)))
        at, rows = [places[:0]], list[Rows]()
        for write in reversed(self._open):
            if not len(places):
                break
            is_found, found = write.rows_of(keys[places])
            if len(found):
                at.append(places[is_found])
                rows.append(found)
                places = places[~is_found]
        return np.concatenate(at), np.concatenate(rows) if rows else None
