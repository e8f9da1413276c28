"""The tensors of a batch, and ids as keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.client.shard import Keys, as_keys

Stamp = tuple[Any, ...]
WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64}


def keys_of(slots: Sequence[torch.Tensor]) -> Keys:
    """The ids of all slots as keys, slot by slot; without a copy if they already lie in this order in memory."""
    first = slots[0]
    if len(slots) == 1 and first.dtype == torch.int64 and first.is_cpu and first.is_contiguous():
        flat: Keys = first.detach().numpy().reshape(-1).view(np.uint64)
        return flat
    if len(slots) > 1 and first.dtype == torch.int64 and not first.is_cuda:
        place, total = first.data_ptr(), 0
        for ids in slots:
            if ids.data_ptr() != place + 8 * total or ids.dtype != torch.int64 or not ids.is_contiguous():
                break
            total += ids.numel()
        else:
            room = first.untyped_storage().nbytes() // 8 - first.storage_offset()
            if total <= room:  # one allocation, not two that happen to be adjacent
                return as_keys(first.detach().as_strided((total,), (1,)).numpy())
    if len(slots) == 1:
        return as_keys(first.detach().cpu().numpy())
    return np.concatenate([as_keys(ids.detach().cpu().numpy()) for ids in slots])


def stamp_of(slots: Sequence[torch.Tensor]) -> Stamp:
    """A stamp that identifies ids while one of the tensors is alive: torch counts in-place changes.

    Tensors of torch.inference_mode have no such count; their values are used instead.
    """
    stamp = []
    for ids in slots:
        version = ids.cpu().numpy().tobytes() if ids.is_inference() else ids._version
        stamp.append((ids.data_ptr(), ids.shape, ids.stride(), version))
    return tuple(stamp)


def num_samples(inputs: Any, tensors: Iterable[torch.Tensor]) -> int:
    """The number of samples in a call of a model: as a batch or slot states it, or the first tensor's length.

    `tensors`: the tensors of the inputs. For a flat list of ids with the offsets of its bags, as torch.nn.EmbeddingBag
    takes them, returns the number of bags.
    """
    told = told_samples(inputs)
    if told is not None:
        return told
    first: torch.Tensor | None = None
    for tensor in tensors:
        if first is None and tensor.dim():
            first = tensor
        elif first is not None and first.dim() == 1 and (bags := _num_bags(tensor, len(first))):
            return bags
    return 0 if first is None else len(first)


def _num_bags(offsets: torch.Tensor, num_ids: int) -> int:
    """The number of bags that begin at these offsets into a flat list of ids; 0 if these are not offsets into it.

    A last offset at the end of the list is taken for torch's include_last_offset.
    """
    is_list = offsets.dim() == 1 and 0 < len(offsets) != num_ids and offsets.dtype in (torch.int64, torch.int32)
    if not is_list or offsets.device.type != "cpu":
        return 0
    starts = offsets.detach().numpy()
    if starts[0] or starts[-1] > num_ids or (starts[1:] < starts[:-1]).any():
        return 0
    return len(starts) - int(starts[-1] == num_ids and len(starts) > 1)


def told_samples(inputs: Any) -> int | None:
    """The number of samples that the first batch or slot among the inputs states; None if none of them does."""
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


def is_no_padding(keys: Keys, padding_idx: int) -> npt.NDArray[np.bool_]:
    is_real: npt.NDArray[np.bool_] = keys != np.int64(padding_idx).astype(np.uint64)
    return is_real


def tensors_of(batch: Any, place: str = "", found: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a batch, however nested, by their place in it. Adds them to `found`, if given."""
    found = {} if found is None else found
    if isinstance(batch, torch.Tensor):
        found[place] = batch
        return found
    is_named = isinstance(batch, Mapping)
    if not is_named and not isinstance(batch, (list, tuple)):
        return found
    for name, value in batch.items() if is_named else enumerate(batch):
        at = f"{place}.{name}" if is_named else f"{place}[{name}]"
        if isinstance(value, torch.Tensor):
            found[at] = value
        else:
            tensors_of(value, at, found)
    return found


def values_of_slot(batch: Mapping[str, torch.Tensor], name: str, num: int, table: str) -> npt.NDArray[np.float32]:
    """One number per sample, from the batch's tensor with this name."""
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
