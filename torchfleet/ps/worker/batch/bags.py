"""Slots of a batch as bags: which ids are pooled into one row of the output."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from torchfleet.base.errors import ModelError


class Bags(NamedTuple):
    """Which ids are pooled: bag b holds those from offsets[b] to offsets[b + 1]; the bags of a slot are adjacent."""

    offsets: np.ndarray[Any, Any]
    num_slots: int
    pooling: str = "sum"  # or "mean", or "max"
    weights: torch.Tensor | None = None  # one per id, for a sum
    by_freq: bool = False  # gradients are divided by the number of times an id appears


def split_slots(slots: list[Any], pooling: str) -> tuple[list[torch.Tensor], Bags]:
    """(the ids of each slot, their bags, slot by slot)."""
    first = slots[0] if slots else None
    if isinstance(first, torch.Tensor) and first.dim() == 2 and all(_is_like(slot, first) for slot in slots):
        total, width = len(slots) * first.numel(), max(1, first.size(1))
        if total:
            return slots, Bags(_even_offsets(total, width), len(slots), pooling)
    pairs = [_bags(slot) for slot in slots]
    if len(pairs) == 1:
        return [pairs[0][0]], Bags(pairs[0][1], 1, pooling)
    sizes = [len(bounds) - 1 for _, bounds in pairs]
    if not sizes or len(set(sizes)) > 1:
        raise ModelError(f"expected slots of one batch, found slots with {sizes} samples")
    ends = np.cumsum([0, *(ids.numel() for ids, _ in pairs)])
    starts = [bounds[:-1] + before for (_, bounds), before in zip(pairs, ends[:-1], strict=True)]
    return [ids for ids, _ in pairs], Bags(np.concatenate([*starts, ends[-1:]]), len(pairs), pooling)


@lru_cache(maxsize=16)
def _even_offsets(total: int, width: int) -> np.ndarray[Any, Any]:
    """Offsets of bags of one size. All batches of that shape share one cached array, because it may take as much memory
    as a batch's ids; callers must not change it.
    """
    return np.arange(0, total + 1, width)


def _is_like(slot: Any, first: torch.Tensor) -> bool:
    return isinstance(slot, torch.Tensor) and slot.shape == first.shape


def _bags(slot: Any) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """(ids, bounds) of a slot: bounds are the offsets of its samples, followed by the number of ids. The slot is given
    as values and offsets, or as a block with one row per sample.
    """
    if isinstance(slot, torch.Tensor):
        if slot.dim() not in (1, 2):
            raise ModelError(f"a slot has one row of ids per sample, found a tensor of shape {tuple(slot.shape)}")
        return slot, np.arange(len(slot) + 1, dtype=np.int64) * (slot.size(1) if slot.dim() == 2 else 1)
    pair = tuple(slot) if isinstance(slot, tuple) else ()
    if len(pair) != 2 or not all(isinstance(half, torch.Tensor) for half in pair):
        raise ModelError(
            "expected a slot of a batch: ids with a row per sample, or values and offsets; found "
            f"{type(slot).__name__}. Give batch['name'], or a list of such slots."
        )
    ids, offsets = pair
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise ModelError(f"offsets must be whole numbers, found {offsets.dtype}")
    if offsets.dim() != 1:
        raise ModelError(f"offsets must have one dimension, found shape {tuple(offsets.shape)}")
    bounds = np.empty(len(offsets) + 1, np.int64)
    bounds[:-1], bounds[-1] = offsets.detach().cpu().numpy(), ids.numel()
    if (bounds[1:] < bounds[:-1]).any() or bounds[0] != 0:
        raise ModelError(
            f"offsets must start at 0 and never fall, up to {ids.numel()} ids; found {offsets.tolist()[:8]}..."
        )
    return ids, bounds
