"""The memories of several tables of one shape as the kernels of a group read them.

Every table keeps its own directory and rows. A kernel for all of them finds their tensors by an array of numbers in
device memory: distances from that array itself, in units of 64 bytes, to which torch aligns tensors. A launch works on
segments: the ids of one table each, one segment after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchfleet.base.cuda_capture import is_capturing
from torchfleet.base.errors import TableError
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.row_memory import ONE_SEGMENT
from torchfleet.ps.gpu.table_memory import TableMemory

UNIT = 64  # bytes

# Of a table, int64: distances of its tensors, then its own numbers
DIRECTORY, COUNTERS, ROW_KEYS, FREE, WORDS, OFFSETS, RATES = range(7)
NUM_POSITIONS, SECRET, SIZE, STREAM, SHIFT = range(7, 12)
FIRST = 12  # the number of its slot 0 among the slots of all tables, as an update sorts them
NUM_FIELDS = 16

# Of a segment, int64
TABLE, COUNT, POSITION = 0, 1, 2  # its table, how many ids, and where they begin
PROGRAM0, PROGRAM1, PROGRAM2, PROGRAM3 = 3, 4, 5, 6  # the first programs of the segment, of the kernels of a call
PADDING, IS_PADDED, PART = 7, 8, 7  # PART: the first row of its parts, in an update
NUM_OF_SEGMENT = 10

_BELOW = 2  # numbers below FIRST: slots from -2 on, which are no rows, are sorted in front of the table's rows
_MOST_KEPT = 64  # lists of segments


class GroupMemory:
    """What kernels of a group read: the numbers of its tables, and the segments of a call."""

    def __init__(self, memories: Sequence[TableMemory], layouts: Sequence[RowLayout], device: torch.device) -> None:
        """Moves the counters of all tables into one tensor, `counters`."""
        self.memories, self.layouts, self.device = list(memories), list(layouts), device
        self.counters = torch.stack([memory.counters for memory in memories])
        for memory, own in zip(memories, self.counters, strict=True):
            memory.counters = own
        self.numbers = torch.zeros(len(self.memories), NUM_FIELDS, dtype=torch.int64, device=device)
        self.num_slots = 0  # numbers of slots of all tables
        self._seen: list[int] = []  # how often the tables had replaced tensors when their numbers were written
        self._segments: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}
        self._captured: list[torch.Tensor] = []  # segments that CUDA graphs hold the addresses of
        self.refresh()

    @property
    def layout(self) -> RowLayout:
        """What all tables have in common."""
        return self.layouts[0]

    def refresh(self) -> None:
        """Write the numbers of tables anew if one has grown. Called before a launch."""
        now = [memory.num_replaced for memory in self.memories]
        if now == self._seen:
            return
        if is_capturing(self.device):
            raise TableError(
                "a table of this group grew after its last step, and a CUDA graph would hold its old addresses: make a "
                "step before the capture"
            )
        rows, first = [], 0
        for memory, layout in zip(self.memories, self.layouts, strict=True):
            rows.append(self._numbers_of(memory, layout, first + _BELOW))
            first += memory.rows.num_rows + _BELOW
        self.numbers.copy_(_on_host(rows, self.device), non_blocking=True)
        self._seen, self.num_slots = now, first

    def _numbers_of(self, memory: TableMemory, layout: RowLayout, first: int) -> list[int]:
        rows = memory.rows
        tensors = (
            memory.directory,
            memory.counters,
            memory.row_keys,
            memory.free,
            rows.segments[0],
            rows.offsets,
            memory.rates,
        )
        shift = rows.shift if len(rows.segments) > 1 else ONE_SEGMENT
        found = [self._distance(tensor) for tensor in tensors]
        found += [memory.num_positions, memory.secret, layout.size, layout.stream, shift, first]
        return found + [0] * (NUM_FIELDS - len(found))

    def _distance(self, tensor: torch.Tensor) -> int:
        distance, rest = divmod(tensor.data_ptr() - self.numbers.data_ptr(), UNIT)
        assert rest == 0, "torch aligns memory to 64 bytes"
        return distance

    def segments(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """These segments in device memory. Batches of the same shapes have the same segments, written once."""
        key = tuple(rows)
        found = self._segments.get(key)
        if is_capturing(self.device):
            if found is None:
                return self._written_by_kernels(key)
            self._captured.append(found)
            return found
        if found is None:
            if len(self._segments) >= _MOST_KEPT:
                self._segments.clear()
            found = self._segments[key] = _on_host(key, self.device).to(self.device, non_blocking=True)
        return found

    def _written_by_kernels(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """`segments` of a shape that appears first in a capture, which cannot copy from the host: the numbers are
        arguments of kernels, and each replay writes them anew.
        """
        made = torch.zeros(len(rows) * NUM_OF_SEGMENT, dtype=torch.int64, device=self.device)
        torch._foreach_add_(list(made.unbind()), [number for row in rows for number in row])
        return made.view(-1, NUM_OF_SEGMENT)


def _on_host(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Numbers in host memory from which the device copies without waiting."""
    made = torch.tensor(rows, dtype=torch.int64)
    return made.pin_memory() if device.type == "cuda" else made
