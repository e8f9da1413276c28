"""The rows of a cache on a device, [value | state] in float32: which key is in which slot, and updates by the table's
rule. The memory and the kernels are those of tables in GPU memory (ps/gpu).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchfleet.ps.gpu import free_rows
from torchfleet.ps.gpu.kernels import plain_kernels
from torchfleet.ps.gpu.kernels.kernel_choice import kernels_for
from torchfleet.ps.gpu.kernels.plain_rules import check_rule
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.table_memory import FRESH, LIMIT, NUM_FREE, OUTSIDE, REFUSED, SPARE, STEP, TAKEN, new_memory
from torchfleet.ps.tables.rules.decay import decayed
from torchfleet.ps.tables.settings.rule import learning_rate
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.cache import evicted_keys

NEW = -1  # the last use of a slot without a row
_ENTRY_BYTES = 16  # of the directory
_MARK_BYTES = 8 + 4 + 4 + 1  # of a slot: its key, its place among the free ones, its last use, whether it is changed


class RowMemory:
    """A fixed number of slots. One thread gives slots to keys; rows of different slots may be read and changed by
    different threads at once.

    Arrays by slot have one element more, which slot -1 (padding) reads and writes.
    """

    def __init__(self, spec: TableSpec, num_slots: int, device: torch.device, step: int = 0) -> None:
        """`step`: the table's number of updates so far."""
        if device.type == "cuda":
            check_rule(spec.rule, spec.name)
        self.spec, self.device, self.num_slots = spec, device, num_slots
        self.layout, self.kernels = RowLayout.of(spec), kernels_for(device)
        self.table = new_memory(self.layout.width, num_slots, device, is_fixed=True)
        self.table.counters[STEP] = step
        self.last_use = torch.full((num_slots + 1,), NEW, dtype=torch.int32, device=device)  # number of a batch
        self.is_changed = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)  # since it came from the servers
        self.has_failed = torch.zeros((), dtype=torch.int32, device=device)  # 1: a gradient was not finite
        self.is_exact = device.type == "cpu"  # updates are those of servers, bit for bit
        self.counters: list[int] = self.table.counters.tolist()  # as they were last read

    @staticmethod
    def bytes_per_row(spec: TableSpec) -> int:
        """Device memory of one cached row, with its key and marks."""
        return 4 * RowLayout.of(spec).width + int(SPARE * _ENTRY_BYTES) + _MARK_BYTES + evicted_keys.BYTES_PER_SLOT

    @property
    def words(self) -> torch.Tensor:
        """(slots, num_words), a view."""
        return self.table.rows.segments[0][:, : self.spec.num_words]

    # Keys and slots

    def place(self, keys: torch.Tensor, padding: int | None) -> torch.Tensor:
        """Slots (int32) of keys, which may repeat; -1 for padding. Keys without a slot get one, with the first values
        of a new row, or NO_ROW if no slot is free. `read_counters` then returns the slots that were given out.
        """
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        return self.kernels.find(self.table, self.layout, keys, True, padding, is_deterministic)

    def read_counters(self) -> torch.Tensor:
        """Wait for the device, and read its counters. Returns the slots that were given out since the last call."""
        before, self.counters = self.counters, self.table.counters.tolist()
        start, stop = before[TAKEN], before[TAKEN] + self._num_given(before)
        num_free, fresh = before[NUM_FREE], before[FRESH] - before[NUM_FREE]
        again = self.table.free[start : min(stop, num_free)].long()
        first = torch.arange(fresh + max(start, num_free), fresh + max(stop, num_free), device=self.device)
        return first if start >= num_free else torch.cat([again, first])

    def _num_given(self, before: list[int]) -> int:
        return min(self.counters[TAKEN] - before[TAKEN], _num_free(before))

    @property
    def num_free(self) -> int:
        """Slots that were free when the counters were read."""
        return _num_free(self.counters)

    @property
    def num_rows(self) -> int:
        return self.num_slots - self.num_free

    @property
    def has_refused(self) -> bool:
        """Whether keys got no slot, when the counters were read."""
        return bool(self.counters[REFUSED])

    def take_outside(self) -> int:
        """How many ids were beyond the table's size when the counters were read. Sets the count back to 0."""
        found, self.counters[OUTSIDE] = self.counters[OUTSIDE], 0
        if found:
            self.table.counters[OUTSIDE] = 0
        return int(found)

    def keys_of(self, slots: torch.Tensor) -> torch.Tensor:
        return self.table.row_keys[slots]

    def use(self, slots: torch.Tensor, batch: int) -> None:
        """Note that a batch uses these slots."""
        self.last_use[slots] = batch

    def count_used(self, batch: int) -> torch.Tensor:
        """How many slots were last used by this batch, as a tensor."""
        return (self.last_use[:-1] == batch).sum()

    def oldest(self, num: int, before: int) -> torch.Tensor:
        """The least recently used slots, among those last used by a batch before `before`: `num` slots or more (a
        batch's slots are taken together), but at most 2 * `num`; all if there are fewer.
        """
        last_use = self.last_use[:-1]
        latest = int(last_use.max())
        ages = (latest - last_use).masked_fill_((last_use == NEW) | (last_use >= before), -1).clamp_(max=_OLDEST)
        counts = torch.bincount(ages + 1, minlength=_OLDEST + 2)[1:]
        enough = (counts.flip(0).cumsum(0) >= num).nonzero()
        youngest = _OLDEST - int(enough[0]) if len(enough) else 0
        return (ages >= youngest).nonzero().squeeze(1)[: 2 * num]

    def erase(self, slots: torch.Tensor) -> None:
        """Drop the rows of these distinct slots, and keys that got no slot. Waits for the device."""
        free_rows.erase(self.table, self.kernels, slots)
        self.last_use[slots] = NEW
        self.is_changed[slots] = False
        self.counters = self.table.counters.tolist()

    def erase_all(self) -> None:
        self.erase((self.last_use[:-1] > NEW).nonzero().squeeze(1))

    # Rows

    def values(self, slots: torch.Tensor) -> torch.Tensor:
        """Values of these rows in a new tensor, (len(slots), dim); zeros for -1."""
        return self.kernels.gather(self.table, slots, self.spec.dim, torch.float32)

    def update(
        self, slots: torch.Tensor, grads: torch.Tensor, touched: torch.Tensor | None, lr: float | None, step: int
    ) -> None:
        """Update number `step` of the table. `touched`: the slots are distinct, and those for which it is True get an
        update; None: slots may repeat, and -1 is left out.

        On a CPU it runs the servers' own kernels, and has their results bit for bit. On a GPU a row whose gradient is
        not finite stays as it is, and `has_failed` is set, without a wait for the GPU.
        """
        if self.is_exact:
            self._update_as_servers(slots, grads, touched, lr, step)
            return
        if touched is not None:
            slots = torch.where(touched, slots, -1)
        rate = self.spec.rule.lr if lr is None else lr
        # The plain kernel sums in the order of the gradients, wherever rows are placed.
        kernels = plain_kernels if torch.are_deterministic_algorithms_enabled() else self.kernels
        kernels.push(self.table, self.layout, slots.int(), grads, rate, self.has_failed)
        self.is_changed[slots] = True

    def _update_as_servers(
        self, slots: torch.Tensor, grads: torch.Tensor, touched: torch.Tensor | None, lr: float | None, step: int
    ) -> None:
        if touched is None:
            assert not len(slots), "gradients of rows on a CPU are summed"
            return
        at, own = slots[touched].long().numpy(), np.ascontiguousarray(grads[touched].numpy(), np.float32)
        rule, store = self.spec.rule, self.table.rows.segments[0].numpy().reshape(-1)
        layout, rate = (self.layout.width, 0), learning_rate(rule, lr, step)
        if rule.weight_decay:
            own = decayed(rule, store, layout, at, own, rate)
        rule.row_rule.apply_to_rows(rule, store, layout, at, own, rate, step)
        self.is_changed[slots[touched]] = True


_OLDEST = 4095  # batches since the last use; higher numbers count as this one


def _num_free(counters: Sequence[int]) -> int:
    return max(0, counters[NUM_FREE] + counters[LIMIT] - counters[FRESH] - counters[TAKEN])
