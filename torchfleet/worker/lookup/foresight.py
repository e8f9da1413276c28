"""Which inputs of a batch reach which table: learned from the first lookups, foreseen from then on.

When an embedding is asked for ids that are (a view of) a tensor of the batch, the way from the batch to the table is
remembered: the place of the tensor in the batch and the shape of the view. For the next batches all ids can then be
collected before the model runs, and pulled in one message per server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.errors import ModelError
from torchfleet.worker.client.shard import Keys, as_keys

Stamp = tuple[Any, ...]


@dataclass(frozen=True)
class View:
    """A window on a tensor whose first dimension is the batch, or the tensor as it is (`sizes` None)."""

    offset: int = 0
    sizes: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    base_strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, ids: torch.Tensor, base: torch.Tensor) -> View | None:
        if not ids.numel():
            return None  # slots of a batch share their memory, and empty ones their place in it
        if ids.numel() == base.numel() and ids.storage_offset() == base.storage_offset():
            return cls()
        if not ids.dim() or not base.dim() or ids.size(0) != base.size(0):
            return None
        offset = ids.storage_offset() - base.storage_offset()
        if offset < 0 or offset + _extent(ids) > _extent(base):
            return None  # it lies in another slot
        return cls(int(offset), tuple(ids.shape[1:]), tuple(ids.stride()), tuple(base.stride()))

    def on(self, base: torch.Tensor) -> torch.Tensor | None:
        """The same window on another batch's tensor, or None if that is laid out differently."""
        if self.sizes is None:
            return base
        if not base.dim() or tuple(base.stride()) != self.base_strides:
            return None
        sizes = (base.size(0), *self.sizes)
        last = base.storage_offset() + self.offset + sum((n - 1) * s for n, s in zip(sizes, self.strides, strict=True))
        if base.numel() == 0 or last >= base.untyped_storage().nbytes() // base.element_size():
            return None
        return base.as_strided(sizes, self.strides, base.storage_offset() + self.offset)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from its first one to its last one in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


class Way(NamedTuple):
    """From a place in the batch to a table."""

    place: str
    table: str
    view: View
    padding_idx: int | None


@dataclass
class Foresight:
    """What has been learned: ways from a batch to tables; and how often it did not help."""

    ways: tuple[Way, ...] = ()  # replaced and never changed: other threads may be going through it
    num_unforeseen: int = 0

    def learn(
        self, batch: Mapping[str, torch.Tensor], table: str, slots: Sequence[torch.Tensor], padding_idx: int | None
    ) -> None:
        """An embedding was asked for these ids, padding aside, and not all of them had been foreseen."""
        self.num_unforeseen += 1
        for ids in slots:
            pointer = ids.untyped_storage().data_ptr()
            views = [
                (place, view)
                for place, tensor in batch.items()
                if tensor.untyped_storage().data_ptr() == pointer and (view := View.of(ids, tensor)) is not None
            ]
            # Slots of a batch may share their memory: a whole tensor of it is a better guess than a window on another.
            views.sort(key=lambda found: found[1].sizes is not None)
            if views:
                way = Way(views[0][0], table, views[0][1], padding_idx)
                self.ways = self.ways if way in self.ways else (*self.ways, way)

    def keys(self, batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[Keys, Stamp | None]]:
        """All ids that this batch is going to ask for, by table; with their stamp if nothing is left out."""
        found: dict[str, list[tuple[torch.Tensor, int | None]]] = {}
        for place, table, view, padding_idx in self.ways:
            tensor = batch.get(place)
            if tensor is None or tensor.is_floating_point():
                continue
            ids = view.on(tensor)
            if ids is not None:
                found.setdefault(table, []).append((ids, padding_idx))
        return {table: _without_padding(slots) for table, slots in found.items()}


def keys_of(slots: Sequence[torch.Tensor]) -> Keys:
    """The ids of one slot after another as keys; where they lie so in memory, as they lie."""
    first = slots[0]
    if len(slots) > 1 and first.dtype == torch.int64 and not first.is_cuda:
        place, total = first.data_ptr(), 0
        for ids in slots:
            if ids.data_ptr() != place + 8 * total or ids.dtype != torch.int64 or not ids.is_contiguous():
                break
            total += ids.numel()
        else:
            room = first.untyped_storage().nbytes() // 8 - first.storage_offset()
            if total <= room:  # one piece of memory, and not two that happen to be neighbours
                return as_keys(first.detach().as_strided((total,), (1,)).numpy())
    keys = [as_keys(ids.detach().cpu().numpy()) for ids in slots]
    return keys[0] if len(keys) == 1 else np.concatenate(keys)


def stamp_of(slots: Sequence[torch.Tensor]) -> Stamp:
    """Ids with one stamp, while one of the tensors is still held, are the same: torch counts changes in place."""
    return tuple([(ids.data_ptr(), ids.shape, ids.stride(), ids._version) for ids in slots])


def num_samples(inputs: Any) -> int:
    """How many samples a model is called with: what a batch or slot says of itself, or the first tensor's length."""
    told = told_samples(inputs)
    return next((len(tensor) for _, tensor in tensors_of(inputs) if tensor.dim()), 0) if told is None else told


def told_samples(inputs: Any) -> int | None:
    """What the first batch or slot among a model's inputs says of itself; None if none of them does."""
    if hasattr(inputs, "num_samples"):
        return int(inputs.num_samples)
    if hasattr(inputs, "offsets"):
        return len(inputs.offsets)
    if isinstance(inputs, Mapping):
        inputs = list(inputs.values())
    if isinstance(inputs, (list, tuple)):
        for value in inputs:
            if hasattr(value, "num_samples") or isinstance(value, (list, tuple, Mapping)):
                told = told_samples(value)
                if told is not None:
                    return told
    return None


def _without_padding(slots: Sequence[tuple[torch.Tensor, int | None]]) -> tuple[Keys, Stamp | None]:
    """From each slot's ids and padding: (their keys, padding left out, and their stamp if no slot has padding)."""
    if all(padding_idx is None for _, padding_idx in slots):
        ids_only = [ids for ids, _ in slots]
        return keys_of(ids_only), stamp_of(ids_only)
    keys = [(keys_of([ids]), padding_idx) for ids, padding_idx in slots]
    return np.concatenate(
        [found if padding is None else found[is_no_padding(found, padding)] for found, padding in keys]
    ), None


def is_no_padding(keys: Keys, padding_idx: int) -> npt.NDArray[np.bool_]:
    is_real: npt.NDArray[np.bool_] = keys != np.int64(padding_idx).astype(np.uint64)
    return is_real


def tensors_of(batch: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a batch, however nested, with the place they stand in."""
    if isinstance(batch, torch.Tensor):
        yield place, batch
    elif isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from tensors_of(value, f"{place}.{name}")
    elif isinstance(batch, (list, tuple)):
        for i, value in enumerate(batch):
            yield from tensors_of(value, f"{place}[{i}]")


def values_of_slot(batch: Mapping[str, torch.Tensor], name: str, num: int, table: str) -> npt.NDArray[np.float32]:
    """One number per sample, from the tensor of this name in the batch."""
    found = [tensor for place, tensor in batch.items() if place.endswith(f".{name}")]
    if not found:
        names = sorted({place.rpartition(".")[2] for place in batch if "." in place})
        raise ModelError(
            f"table '{table}' keeps statistics from slot '{name}' (ShowClickEntry), and the batch has "
            f"{', '.join(names) or 'no names'}. Train from a dataset, or over fleet.prefetch(loader) with batches that "
            "are dicts: the model alone does not see such slots."
        )
    values = found[0].detach().cpu()
    if values.numel() != num:
        raise ModelError(
            f"slot '{name}' of table '{table}' must have one number per sample: {num} samples, {values.numel()} numbers"
        )
    return np.ascontiguousarray(values.reshape(-1).to(torch.float32).numpy())
