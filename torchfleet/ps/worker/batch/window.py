"""Windows on a batch's tensors: the same columns of every batch, however they were selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Window:
    """A window on a tensor whose first dimension is the batch, or the tensor as it is (`sizes` None)."""

    offset: int = 0
    sizes: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    base_strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, part: torch.Tensor, base: torch.Tensor) -> Window | None:
        """The window that `part` is on `base`, which shares its memory; None if it is not a window."""
        if not part.numel():
            return None  # slots of a batch share memory, and empty ones share an address
        offset = part.storage_offset() - base.storage_offset()
        if part.shape == base.shape and part.stride() == base.stride() and not offset:
            return cls()
        if not part.dim() or not base.dim() or part.size(0) != base.size(0):
            return None
        if offset < 0 or offset + _extent(part) > _extent(base):
            return None  # it lies in another slot
        return cls(int(offset), tuple(part.shape[1:]), tuple(part.stride()), tuple(base.stride()))

    def on(self, base: torch.Tensor) -> torch.Tensor | None:
        """The same window on another batch's tensor; None if that has a different layout."""
        if self.sizes is None:
            return base
        if not base.dim() or base.stride() != self.base_strides:
            return None
        sizes = (base.size(0), *self.sizes)
        last = base.storage_offset() + self.offset + sum((n - 1) * s for n, s in zip(sizes, self.strides, strict=True))
        if base.numel() == 0 or last >= base.untyped_storage().nbytes() // base.element_size():
            return None
        return base.as_strided(sizes, self.strides, base.storage_offset() + self.offset)


def _extent(tensor: torch.Tensor) -> int:
    """Number of elements from the first to the last in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
