"""The rows of a table on a device that changed, and the keys that lost their rows, since the last save: what a delta
writes. There are two generations. A save writes one of them; changes made during the save belong to the next.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch


class Slotted(Protocol):
    """A table with numbered rows."""

    @property
    def device(self) -> torch.device: ...

    @property
    def capacity(self) -> int: ...


class ChangeTracking:
    """Marks by slot. A call costs one kernel, and does not wait for the device."""

    def __init__(self, table: Slotted) -> None:
        self._table, self._lock = table, threading.Lock()  # a thread may save while another one trains
        self._marks = [self._none(), self._none()]  # of the current save, and since it began
        self._gone: list[list[torch.Tensor]] = [[], []]

    def mark(self, slots: torch.Tensor) -> None:
        """Mark rows as changed. Slots may repeat; -1 is ignored."""
        with self._lock:
            marks = self._marks[1]
            if len(marks) <= self._table.capacity:
                marks = self._marks[1] = self._grown(marks)
            marks.index_fill_(0, slots.long(), True)  # -1 marks the last place, which belongs to no row

    def note_gone(self, keys: torch.Tensor) -> None:
        """Record that these keys lost their rows."""
        with self._lock:
            self._gone[1].append(keys.clone())

    def begin(self, is_committed: bool) -> None:
        """Begin a save, which must write everything that changed since the previous save began, and if that save was
        not committed, also what it had to write.
        """
        with self._lock:
            marks, gone = self._grown(self._marks[1]), self._gone[1]
            if not is_committed:
                marks, gone = marks | self._grown(self._marks[0]), [*self._gone[0], *gone]
            self._marks[1].zero_()  # in place: a CUDA graph may hold its address
            self._marks[0], self._gone = marks, [gone, []]

    def changed(self, start: int, stop: int) -> torch.Tensor:
        """Those of the slots start..stop that the current save must write."""
        found: torch.Tensor = self._marks[0][start : min(stop, len(self._marks[0]) - 1)].nonzero().squeeze(1) + start
        return found

    @property
    def gone(self) -> torch.Tensor:
        """Distinct keys that the current save must write as deleted; some may have a new row."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._table.device)
        distinct: torch.Tensor = torch.unique(torch.cat([nothing, *self._gone[0]]))
        return distinct

    def _none(self) -> torch.Tensor:
        return torch.zeros(self._table.capacity + 1, dtype=torch.bool, device=self._table.device)

    def _grown(self, marks: torch.Tensor) -> torch.Tensor:
        """The same marks for the present capacity."""
        grown = self._none()
        grown[: len(marks) - 1] = marks[:-1]
        return grown
