"""Tables of one shape on one device: one launch of each kernel for all of them, in a lookup and in an update.

Every table stays a table of its own: its rows, directory, counters, admission, eviction and saves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from torchfleet.base.errors import TableError
from torchfleet.ps.gpu import device_errors
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.group_memory import GroupMemory
from torchfleet.ps.gpu.kernels.kernel_choice import GroupKernels, group_kernels_for
from torchfleet.ps.gpu.kernels.plain_groups import Part, spans
from torchfleet.ps.gpu.occupancy import CounterCopies

Found = tuple[torch.Tensor, torch.Tensor]  # slots, values


def shape_of(table: DeviceTable) -> Hashable:
    """What tables of a group have in common."""
    return replace(table.layout, stream=0, size=0), table.device, table.deterministic


class TableGroup:
    """Tables with the same shape. A call has the same result as calls to each table, one after the other."""

    def __init__(self, tables: Sequence[DeviceTable]) -> None:
        """Waits for the device. Raises TableError if the tables differ, or a CUDA graph has captured one."""
        self.tables = list(tables)
        first = self.tables[0]
        for table in self.tables:
            if shape_of(table) != shape_of(first):
                raise TableError(
                    f"tables '{first.name}' and '{table.name}' differ in dim, rule, first values, statistics or "
                    "device: expected tables of one shape. Make a group of each shape"
                )
            if table.is_captured:
                raise TableError(
                    f"table '{table.name}' is part of a CUDA graph, which holds its addresses: make the group before "
                    "the capture"
                )
        self.memory = GroupMemory([t.memory for t in self.tables], [t.layout for t in self.tables], first.device)
        self.kernels: GroupKernels = group_kernels_for(first.kernels)
        self._copies = CounterCopies(self.memory.counters)
        for place, table in enumerate(self.tables):
            table.occupancy.share(self._copies, place)

    @property
    def device(self) -> torch.device:
        return self.tables[0].device

    @property
    def dim(self) -> int:
        return self.tables[0].dim

    def find_and_gather(
        self,
        asked: Sequence[tuple[int, torch.Tensor, int | None]],
        insert: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> list[Found]:
        """For each (number of a table, keys, padding), as DeviceTable.find_and_gather; views of two tensors. A table is
        asked once, and has no entry if `insert`.
        """
        tables, keys, parts = [], [], []
        for number, ids, padding in asked:
            table = self.tables[number]
            assert not (insert and table.has_entry), "the host decides which ids get rows: such a table is asked alone"
            tables.append(table)
            keys.append(table.begin(ids, insert, padding)[0])
            parts.append(Part(number, len(keys[-1]), padding))
        assert len({part.table for part in parts}) == len(parts), "room is made for one part of a table"
        self.memory.refresh()
        joined = keys[0] if len(keys) == 1 else torch.cat(keys)
        slots, values = self.kernels.find_and_gather(
            self.memory, parts, joined, insert, dtype, self.tables[0].deterministic
        )
        found = [(slots[own], values[own]) for own in spans(part.num for part in parts)]
        for table, (own, _) in zip(tables, found, strict=True):
            table.end(own, insert, is_joined=True)
        if self.device.type == "cuda" and not tables[0].is_capturing:
            self._copies.begin()
        return found

    def push(
        self, counts: Sequence[int], slots: torch.Tensor, grads: torch.Tensor, lr: float | torch.Tensor | None = None
    ) -> None:
        """One update of every table, as DeviceTable.push: the first counts[0] slots and gradients are those of the
        first table, and so on. A table without gradients counts the update.
        """
        if len(counts) != len(self.tables) or sum(counts) != len(slots):
            raise TableError(
                f"expected slots of {len(self.tables)} tables, {sum(counts)} in all; found {len(counts)} tables and "
                f"{len(slots)} slots"
            )
        device_errors.check_gradients(self.tables[0].name, grads, len(slots), self.dim)
        self.memory.refresh()
        rate = self.memory.layout.rule.lr if lr is None else lr
        self.kernels.push(self.memory, counts, slots, grads, rate)
        for table, own in zip(self.tables, spans(counts), strict=True):
            if table.tracking is not None:
                table.mark(slots[own])
