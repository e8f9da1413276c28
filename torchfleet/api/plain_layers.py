"""Layers that replace a SparseEmbedding in a plain model: same calls, with the rows as a parameter.

They use only operations that torch.export and ONNX support, and no loops over data, so that a trace is valid for other
batches.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.nn import functional as F

from torchfleet.ps.worker.batch.string_ids import with_hashed


class SlotLayer(torch.nn.Module):
    """Maps ids of any shape to their rows. With offsets, for a slot (values, offsets) or for a list of slots, pools
    them to one row per bag.
    """

    def __init__(self, weight: torch.nn.Parameter, padding_idx: int | None, pooling: str) -> None:
        super().__init__()
        self.weight, self.padding_idx, self.pooling = weight, padding_idx, pooling

    def forward(
        self, ids: Any, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        ids = ids if isinstance(ids, torch.Tensor) else with_hashed(ids)
        if offsets is not None:
            return self._ragged(ids, offsets, per_sample_weights)
        if isinstance(ids, torch.Tensor):
            return self.rows(ids)
        if isinstance(ids, tuple):
            values, starts = ids
            return self._ragged(values, starts, per_sample_weights)
        return torch.stack([self._slot(slot) for slot in ids], dim=1)

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """One row per id: shape (*ids.shape, dim). Padding ids give zeros."""

    def _slot(self, slot: Any) -> torch.Tensor:
        if not isinstance(slot, torch.Tensor):
            return self._ragged(*slot)
        rows, real = self.rows(slot), self._is_real(slot)
        if slot.dim() == 1:
            return rows
        if self.pooling == "max":
            return _or_zeros(torch.where(real.unsqueeze(-1), rows, -torch.inf).amax(dim=1))
        return self._pooled(rows.sum(dim=1), real.sum(dim=1))

    def _ragged(self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The bag of an id is the number of bags that begin at or before it, minus one."""
        ids = ids.reshape(-1)
        begins = torch.zeros(ids.shape[0] + 1, dtype=torch.int64, device=ids.device)
        begins = begins.scatter_add(0, offsets.long(), torch.ones_like(offsets, dtype=torch.int64))
        bags = begins.cumsum(0)[:-1] - 1
        rows, real = self.rows(ids), self._is_real(ids)
        if weights is not None:
            rows = rows * weights.reshape(-1, 1)
        sums = torch.zeros(offsets.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
        places = bags.unsqueeze(1).expand_as(rows)
        if self.pooling == "max":
            rows = torch.where(real.unsqueeze(-1), rows, -torch.inf)
            return _or_zeros((sums - torch.inf).scatter_reduce(0, places, rows, "amax"))
        counts = torch.zeros(offsets.shape[0], dtype=torch.int64, device=rows.device)
        return self._pooled(sums.scatter_add(0, places, rows), counts.scatter_add(0, bags, real.long()))

    def _pooled(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return sums if self.pooling == "sum" else sums / counts.clamp(min=1).unsqueeze(1)

    def _is_real(self, ids: torch.Tensor) -> torch.Tensor:
        """Which ids are not padding."""
        return torch.ones_like(ids, dtype=torch.bool) if self.padding_idx is None else ids != self.padding_idx

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, padding_idx={self.padding_idx}, {self.pooling}"


def _or_zeros(largest: torch.Tensor) -> torch.Tensor:
    """Replace the result of empty bags by zeros."""
    return torch.where(largest == -torch.inf, 0.0, largest)


class SizedEmbedding(SlotLayer):
    """Rows of the ids from 0 up to a fixed size."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids.long(), self.weight)
        return rows if self.padding_idx is None else rows * self._is_real(ids).unsqueeze(-1)


class KeyedEmbedding(SlotLayer):
    """Rows of arbitrary ids. `ids`, in ascending order, has the ids with a row, at the row's index. Other ids read as
    zeros.

    A table without rows gets one row of zeros, for id 0.
    """

    ids: torch.Tensor

    def __init__(
        self, ids: torch.Tensor, weight: torch.nn.Parameter, padding_idx: int | None = None, pooling: str = "sum"
    ) -> None:
        super().__init__(weight, padding_idx, pooling)
        self.register_buffer("ids", ids)

    def index(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(index of each id, whether it has a row). A binary search for all ids at once, since ONNX has no
        searchsorted.
        """
        num, shape = self.ids.shape[0], ids.shape
        ids = ids.reshape(-1)
        at = torch.zeros_like(ids)
        for bit in reversed(range(num.bit_length())):
            further = at + (1 << bit)
            # not self.ids[...], for which the ONNX exporter writes the ids again at each use
            is_before = self.ids.index_select(0, further.clamp(max=num - 1)) <= ids
            at = torch.where((further < num) & is_before, further, at)
        return at.view(shape), (self.ids.index_select(0, at) == ids).view(shape)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.long()
        at, has_row = self.index(ids)
        return F.embedding(at, self.weight) * (has_row & self._is_real(ids)).unsqueeze(-1)
