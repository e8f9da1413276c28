"""All samples of a worker in memory: rows, appended in reserved address space, and the order of iteration."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from torchfleet.base.errors import DataError
from torchfleet.data.sample_rows import Index, SampleRows
from torchfleet.data.slots import SampleLayout
from torchfleet.ps.kernels import batches
from torchfleet.ps.tables.rows.memory import Memory, physical_bytes


class Store:
    """Grows without copying; several threads may call `append`."""

    def __init__(self, layout: SampleLayout) -> None:
        self.layout = layout
        self._memory = Memory(physical_bytes()), Memory(physical_bytes() // 2)
        self._words = self._memory[0].array(np.uint32)
        self._starts = self._memory[1].array(np.int64)
        self._num = self._used = 0
        self._lock = threading.Lock()
        self._num_readers = 0
        self.order: Index = np.empty(0, np.int64)

    @property
    def rows(self) -> SampleRows:
        return SampleRows(self._words[: self._used], self._starts[: self._num + 1])

    @property
    def num(self) -> int:
        return self._num

    @property
    def num_bytes(self) -> int:
        return 4 * self._used + 8 * self._num + self.order.nbytes

    def append(self, rows: SampleRows) -> range:
        """Returns the indices of the new rows. They are not in `order` yet."""
        with self._lock:
            first, at = self._num, self._used
            if at + len(rows.words) > len(self._words) or first + rows.num >= len(self._starts):
                raise DataError(
                    f"the samples do not fit into this machine's memory ({self.num_bytes:,} bytes so far): use more "
                    "workers, or a QueueDataset"
                )
            self._words[at : at + len(rows.words)] = rows.words
            self._starts[first + 1 : first + 1 + rows.num] = rows.starts[1:] + at
            self._num, self._used = first + rows.num, at + len(rows.words)
            return range(first, self._num)

    def add_reader(self) -> None:
        """Keep the rows in memory until `remove_reader`, even while `drain` runs."""
        with self._lock:
            self._num_readers += 1

    def remove_reader(self) -> None:
        with self._lock:
            self._num_readers -= 1

    def drain(self, num_rows: int) -> Iterator[tuple[range, SampleRows]]:
        """All rows, `num_rows` at a time; releases memory along the way. The store is empty afterwards."""
        rows = self.rows
        for first in range(0, self._num, num_rows):
            last = min(first + num_rows, self._num)
            start, stop = int(rows.starts[first]), int(rows.starts[last])
            yield range(first, last), SampleRows(rows.words[start:stop], rows.starts[first : last + 1] - start)
            if not self._num_readers:
                self._memory[0].release_up_to(4 * stop)
                self._memory[1].release_up_to(8 * last)
        self._num = self._used = 0
        self.order = np.empty(0, np.int64)

    def with_slot_shuffled(self, slot: int, rng: np.random.Generator) -> Store:
        """A copy in which the values of one slot are permuted among the samples."""
        donors = rng.permutation(self.order)
        words = np.empty(batches.total_words(self.rows.starts, self.order), np.uint32)
        starts = np.empty(len(self.order) + 1, np.int64)
        layout = self.layout
        batches.swap_slot(
            self.rows.words, self.rows.starts, self.order, donors, slot, layout.dims, layout.sizes, words, starts
        )
        copy = Store(layout)
        copy.append(SampleRows(words, starts))
        copy.order = np.arange(copy.num)
        return copy
