"""The forward of an embedding whose table is on a device: rows of ids as they are, or pooled over bags, on the device.
The ids are known before the lookup, so that ids of several embeddings can be looked up together.

Nothing here reads a tensor's numbers on the host: there is no wait for the device, torch.compile finds no graph break,
and a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torchfleet.base.errors import ModelError, WrongIds


class Prepared(NamedTuple):
    """A call of an embedding: the ids that it looks up; `finish` makes its output of their rows, (*ids.shape, dim)."""

    ids: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor]


def as_they_are(ids: torch.Tensor) -> Prepared:
    return Prepared(ids, lambda values: values)


def pooled(
    table: str, slots: Sequence[Any], pooling: str, weights: torch.Tensor | None, padding: int | None
) -> Prepared:
    """One row per sample and slot: (samples, slots, dim). A slot is (values, offsets), or a block with a row per
    sample.
    """
    blocks = [slot for slot in slots if isinstance(slot, torch.Tensor)]
    if len(blocks) == len(slots) and all(block.shape == blocks[0].shape for block in blocks):
        ids = torch.stack(list(blocks), 1)  # (samples, slots, ids), or (samples, slots)
        return Prepared(ids, lambda values: _of_blocks(values, ids, pooling, weights, padding))
    pairs = [_pair(slot, table) for slot in slots]
    if len({len(offsets) for _, offsets in pairs}) > 1:
        raise ModelError(
            f"expected slots of one batch, found slots with {[len(offsets) for _, offsets in pairs]} samples"
        )
    every = torch.cat([ids for ids, _ in pairs])
    starts, first = [], 0
    for values, offsets in pairs:
        starts.append(offsets + first)
        first += len(values)
    return Prepared(every, lambda values: _of_pairs(values, every, starts, pooling, weights, padding))


def _of_pairs(
    values: torch.Tensor,
    ids: torch.Tensor,
    starts: Sequence[torch.Tensor],
    pooling: str,
    weights: torch.Tensor | None,
    padding: int | None,
) -> torch.Tensor:
    """Slots of bags of any length, one slot after the other."""
    out = _bags(values, ids, torch.cat(list(starts)), pooling, weights, padding)
    return out.view(len(starts), -1, values.size(-1)).transpose(0, 1)


def _of_blocks(
    values: torch.Tensor, ids: torch.Tensor, pooling: str, weights: torch.Tensor | None, padding: int | None
) -> torch.Tensor:
    """Slots of equal shape: one column of ids per slot, or bags of equal length."""
    if ids.dim() == 2:
        return values if weights is None else values * weights.reshape(len(ids), 1, 1).to(values)
    if ids.dim() != 3:
        found = (len(ids), *ids.shape[2:])
        raise ModelError(f"a slot has one row of ids per sample, found a tensor of shape {found}")
    if weights is not None:
        values = values * weights.reshape(len(ids), 1, -1, 1).to(values)
    if pooling == "sum":
        return values.sum(2)
    if padding is None:
        return values.mean(2) if pooling == "mean" else values.amax(2)
    is_real = (ids != padding).unsqueeze(-1)
    if pooling == "mean":
        return values.sum(2) / is_real.sum(2).clamp(min=1)
    largest = values.masked_fill(~is_real, -torch.inf).amax(2)
    return largest.masked_fill(~is_real.any(2), 0.0)


def _bags(
    values: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    pooling: str,
    weights: torch.Tensor | None,
    padding: int | None,
) -> torch.Tensor:
    """Rows pooled over bags of any length, by torch's own kernel, for which a row's position is its id."""
    places = torch.arange(len(values), device=values.device)
    ignored = None
    if padding is not None:
        ignored = len(values)
        values = F.pad(values, (0, 0, 0, 1))
        places = torch.where(ids == padding, ignored, places)
    weights = None if weights is None else weights.to(values)
    return F.embedding_bag(
        places,
        values,
        offsets,
        mode=pooling,
        per_sample_weights=weights,
        padding_idx=ignored,
        include_last_offset=False,
    )


def _pair(slot: Any, table: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, offsets) of a slot, in one dimension."""
    if isinstance(slot, torch.Tensor):
        if slot.dim() not in (1, 2):
            raise ModelError(f"a slot has one row of ids per sample, found a tensor of shape {tuple(slot.shape)}")
        width = slot.size(1) if slot.dim() == 2 else 1
        return slot.reshape(-1), torch.arange(len(slot), device=slot.device) * width
    pair = tuple(slot) if isinstance(slot, tuple) else ()
    if len(pair) != 2 or not all(isinstance(half, torch.Tensor) and half.dim() == 1 for half in pair):
        raise WrongIds(
            f"table '{table}' expects a slot of a batch: ids with a row per sample, or values and offsets of one "
            f"dimension; found {type(slot).__name__}"
        )
    if pair[1].dtype not in (torch.int64, torch.int32):
        raise ModelError(f"offsets must be whole numbers, found {pair[1].dtype}")
    return pair[0], pair[1].to(pair[0].device, torch.int64)
