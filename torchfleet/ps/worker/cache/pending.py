"""Gradients of cached rows that wait for the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Pending:
    """Gradients of slots. `touched` None: slots may repeat, and -1 is padding; otherwise slots are distinct, and those
    for which `touched` is True have a gradient. Holds the batches, so that their rows stay in the cache.
    """

    batches: list[Any]
    slots: torch.Tensor
    grads: torch.Tensor
    touched: torch.Tensor | None

    def pending(self) -> Pending:
        """Itself."""
        return self

    def whole_gradients(self) -> torch.Tensor:
        """The gradients of all rows, zeros for rows without one. A change of this tensor changes the update."""
        if self.touched is None:
            self.slots, self.grads, self.touched = _summed([self])
        self.grads.masked_fill_(~self.touched[:, None], 0.0)
        return self.grads

    def is_finite(self) -> bool:
        """Whether all gradients are finite. Waits for the device."""
        is_finite = self.grads.isfinite().all(1)
        return bool((is_finite if self.touched is None else is_finite | ~self.touched).all())

    @staticmethod
    def joined(parts: Sequence[Pending]) -> Pending:
        """The gradients of several batches together."""
        if len(parts) == 1:
            return parts[0]
        batches = [batch for part in parts for batch in part.batches]
        if all(part.touched is None for part in parts):
            grads = torch.cat([part.grads.float() for part in parts])
            return Pending(batches, torch.cat([part.slots for part in parts]), grads, None)
        return Pending(batches, *_summed(parts))


def _summed(parts: Sequence[Pending]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(distinct slots, sums of their gradients, whether a slot has one)."""
    every = torch.cat([part.slots for part in parts])
    is_given = torch.cat([part.slots >= 0 if part.touched is None else part.touched for part in parts])
    slots, inverse = torch.unique(every, return_inverse=True)
    grads = torch.cat([part.grads.float() for part in parts])
    grads = torch.ops.aten.embedding_dense_backward(
        grads.masked_fill(~is_given[:, None], 0.0), inverse, len(slots), -1, False
    )
    touched = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
    touched[inverse[is_given]] = True
    is_row = slots >= 0
    return slots[is_row], grads[is_row], touched[is_row]
