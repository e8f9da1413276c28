"""The rows of a cache on a device, [value | state] in float32, and the update of some of them by the table's rule."""

from __future__ import annotations

import numpy as np
import torch

from torchfleet.ps.gpu.plain_rules import check_rule, step_rate, updated
from torchfleet.ps.tables.rules.decay import decayed, decays
from torchfleet.ps.tables.settings.rule import learning_rate
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.cache.key_directory import KeyDirectory

_MARK_BYTES = 8 + 8 + 1 + 1  # of a slot: its last use, its place among the free ones, whether it is changed or gone


class RowMemory:
    """A fixed number of slots. Rows of different slots may be read and changed by different threads at once."""

    def __init__(self, spec: TableSpec, num_slots: int, device: torch.device) -> None:
        if device.type == "cuda":
            check_rule(spec.rule, spec.name)
        self.spec, self.device, self.num_slots = spec, device, num_slots
        self.words = torch.zeros(num_slots, spec.num_words, dtype=torch.float32, device=device)
        self.last_use = torch.full((num_slots,), -1, dtype=torch.int64, device=device)  # number of a batch
        self.is_changed = torch.zeros(num_slots, dtype=torch.bool, device=device)  # since it came from the servers
        self.has_failed = torch.zeros((), dtype=torch.bool, device=device)  # a gradient was not finite

    @staticmethod
    def bytes_per_row(spec: TableSpec) -> int:
        """Device memory of one cached row, with its key and marks."""
        return 4 * spec.num_words + _MARK_BYTES + KeyDirectory.bytes_per_key()

    def values(self, slots: torch.Tensor) -> torch.Tensor:
        """Values of these rows in a new tensor, (len(slots), dim)."""
        return self.words[:, : self.spec.dim].index_select(0, slots)

    def update(
        self, slots: torch.Tensor, grads: torch.Tensor, touched: torch.Tensor, lr: float | None, step: int
    ) -> None:
        """Update number `step` of the table, on those of these distinct slots that are touched, with one gradient each.
        On a CPU it runs the servers' own kernels, and has their results bit for bit. On a GPU a row whose gradient is
        not finite stays as it is, and `has_failed` says so: that needs no wait for the GPU.
        """
        if self.device.type == "cuda":
            self._update_on_device(slots, grads, touched, lr, step)
            return
        at, own = slots[touched].numpy(), np.ascontiguousarray(grads[touched].numpy(), np.float32)
        rule, store, layout = self.spec.rule, self.words.numpy().reshape(-1), (self.spec.num_words, 0)
        rate = learning_rate(rule, lr, step)
        if rule.weight_decay:
            own = decayed(rule, store, layout, at, own, rate)
        rule.row_rule.apply_to_rows(rule, store, layout, at, own, rate, step)
        self.is_changed[slots[touched]] = True

    def _update_on_device(
        self, slots: torch.Tensor, grads: torch.Tensor, touched: torch.Tensor, lr: float | None, step: int
    ) -> None:
        rule = self.spec.rule
        asked = rule.lr if lr is None else lr
        rate, factor = step_rate(rule, asked, step), decays(rule, learning_rate(rule, lr, step))[1]
        is_finite = grads.isfinite().all(1)
        self.has_failed |= (touched & ~is_finite).any()
        words, is_kept = self.words.index_select(0, slots), ~(touched & is_finite)[:, None]
        made = updated(rule, self.spec.dim, words, grads, rate, factor)
        self.words.index_copy_(0, slots, torch.where(is_kept, words, made))
        self.is_changed[slots] = self.is_changed[slots] | touched
