"""How many rows of a table are left, without waiting for the device.

A kernel that inserts keys advances counters in device memory. The host copies them after each call and reads a copy
when it has arrived; until then every id of the calls since counts as a new key. Only if the rows might not suffice by
this count does the host wait for the exact one.
"""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.ps.gpu.table_memory import FRESH, LIMIT, NUM_FREE, TAKEN, TableMemory


class CounterCopies:
    """Copies of the counters of one or several tables in host memory, one under way at a time. The first one is
    number 1.
    """

    def __init__(self, counters: torch.Tensor) -> None:
        """`counters`: (tables, NUM_COUNTERS), the tensor that kernels advance."""
        self._counters = counters
        self._copy = torch.zeros(counters.shape, dtype=torch.int64, pin_memory=counters.is_cuda)
        self._arrival: Any = None  # of the copy that is under way
        self.num_begun = 0
        self.num_arrived = 0
        self.found: list[list[int]] = []  # in the copy that arrived last

    def look(self) -> None:
        """Take over a copy that has arrived."""
        if self._arrival is not None and self._arrival.query():
            self.found, self.num_arrived, self._arrival = self._copy.tolist(), self.num_begun, None

    def begin(self) -> None:
        """Begin another copy, unless one is under way."""
        self.look()
        if self._arrival is None:
            self._copy.copy_(self._counters, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()
            self.num_begun += 1


class Occupancy:
    """The rows that a table's memory has left."""

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._is_cuda = memory.counters.is_cuda
        self._num_copied = 0  # ids of calls that copy number `_begun` does not contain
        self._num_since = 0  # ids of calls that the known counters do not contain
        self._begun = self._taken = 0  # the last copy that began when `_num_copied` was 0; the last one looked at
        self.share(CounterCopies(memory.counters.unsqueeze(0)), 0)

    def share(self, copies: CounterCopies, place: int) -> None:
        """Read the counters at `place` of copies that other tables read, too. Waits for the device."""
        self._copies, self._place = copies, place
        self.refresh()

    def _exact(self) -> list[int]:
        counters: list[int] = self._memory.counters.tolist()  # waits for the device
        return counters

    def is_enough_for(self, num_keys: int) -> bool:
        """Whether this many new keys have room for certain. Does not wait if the answer is yes."""
        if _room(self._known) - self._num_since >= num_keys:
            return True
        self._look()
        if _room(self._known) - self._num_since >= num_keys:
            return True
        self.refresh()
        return _room(self._known) >= num_keys

    def _look(self) -> None:
        """Take over a copy that has arrived and began after the last `refresh`."""
        self._copies.look()
        if self._copies.num_arrived > self._taken:
            self._known, self._taken = self._copies.found[self._place], self._copies.num_arrived
            self._num_since = self._num_copied if self._begun == self._taken else 0

    def note(self, num_keys: int) -> None:
        """Record that a call was issued that may insert this many keys."""
        self.add(num_keys)
        if self._is_cuda:
            self._copies.begin()

    def add(self, num_keys: int) -> None:
        """`note`, where the caller begins the copy: one for several tables."""
        self._look()
        if self._begun != self._copies.num_begun:  # a copy that began since contains all earlier calls
            self._begun, self._num_copied = self._copies.num_begun, 0
        self._num_since += num_keys
        self._num_copied += num_keys
        if not self._is_cuda:
            self.refresh()

    def refresh(self) -> None:
        """Wait for the device, and read its counters. Called whenever the memory was changed."""
        self._known, self._num_since, self._num_copied = self._exact(), 0, 0
        self._begun = self._taken = self._copies.num_begun  # copies that have begun are older

    @property
    def known(self) -> list[int]:
        """The counters, as far as they are known without waiting."""
        self._look()
        return self._known

    @property
    def num_rows(self) -> int:
        """Rows in use. Waits for the device."""
        self.refresh()
        return rows_in_use(self._known)

    @property
    def room(self) -> int:
        """Rows that are left. Waits for the device."""
        self.refresh()
        return _room(self._known)


def rows_in_use(counters: list[int]) -> int:
    return counters[FRESH] - counters[NUM_FREE] + min(counters[TAKEN], _all(counters))


def _all(counters: list[int]) -> int:
    """Rows that could be given out when the list of free rows was made."""
    return counters[NUM_FREE] + counters[LIMIT] - counters[FRESH]


def _room(counters: list[int]) -> int:
    return max(0, _all(counters) - counters[TAKEN])
