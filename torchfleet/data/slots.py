"""Slots, and batches of them: one block of memory per batch, and a view of it per slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.base.errors import DataError
from torchfleet.data.sample_rows import SampleRows
from torchfleet.ps.kernels import batches

DTYPES: dict[str, np.dtype[Any]] = {"int64": np.dtype(np.int64), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Slot:
    """A named field of every sample: `dim` values, or any number of them if `dim` is None."""

    name: str
    dtype: str = "int64"
    dim: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise DataError(f"Slot: expected a name, found {self.name!r}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise DataError(f"Slot '{self.name}': dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}")
        if self.dim is not None and (not isinstance(self.dim, int) or self.dim < 1):
            raise DataError(f"Slot '{self.name}': dim must be at least 1, or None for any number; found {self.dim!r}")


class Ragged(NamedTuple):
    """The values of all samples, concatenated, and the offset of each sample's first value."""

    values: torch.Tensor
    offsets: torch.Tensor

    @property
    def num_samples(self) -> int:
        return len(self.offsets)

    def split(self) -> list[torch.Tensor]:
        """One tensor per sample."""
        bounds = [*self.offsets.tolist(), len(self.values)]
        return [self.values[start:stop] for start, stop in pairwise(bounds)]

    def padded(self, length: int, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, mask), both of shape (samples, length), for models of sequences: the last `length` values of each
        sample, followed by `padding` if there are fewer; and True where there is a value.
        """
        if length < 1:
            raise DataError(f"Ragged.padded: expected a length of at least 1, found {length}")
        ends = torch.cat([self.offsets[1:], self.offsets.new_tensor([len(self.values)])])
        first = torch.maximum(self.offsets, ends - length)
        at = first[:, None] + torch.arange(length, device=first.device)
        is_there = at < ends[:, None]
        found = self.values.new_full(at.shape, padding)
        found[is_there] = self.values[at[is_there]]
        return found, is_there


class Batch(Mapping[str, Any]):
    """Slots by name: a tensor for a slot of fixed `dim`, a Ragged for others."""

    def __init__(self, parts: dict[str, torch.Tensor | Ragged], num_samples: int | None = None) -> None:
        """Without `num_samples` it is computed from the slots: a DataLoader makes copies that way."""
        self._slots = parts
        if num_samples is None:
            first = next(iter(parts.values()))
            num_samples = first.num_samples if isinstance(first, Ragged) else len(first)
        self.num_samples = num_samples

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            raise KeyError(f"no slot '{name}' in this batch; it has {', '.join(self._slots)}")
        return self._slots[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"Batch({self.num_samples} samples: {', '.join(self._slots)})"


class RowSelection(NamedTuple):
    """Some of the rows, by their indices, in this order."""

    rows: SampleRows
    order: npt.NDArray[np.int64]


class SampleLayout:
    """The layout of samples of these slots in a row and in a batch."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        if not isinstance(slots, Sequence) or not slots or not all(isinstance(slot, Slot) for slot in slots):
            raise DataError(f"use_var: expected a list of fleet.Slot, found {slots!r}")
        names = [slot.name for slot in slots]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise DataError(f"use_var: two slots have one name: {', '.join(twice)}")
        self.slots = tuple(slots)
        self.is_float = np.array([slot.dtype == "float32" for slot in slots])
        self.dims = np.array([-1 if slot.dim is None else slot.dim for slot in slots], np.int64)
        self.sizes = np.where(self.is_float, 1, 2).astype(np.int64)
        self.ragged = np.cumsum(self.dims < 0) - 1
        self.ragged[self.dims >= 0] = -1
        # Values of eight bytes come first, for alignment.
        self._order = sorted(range(len(slots)), key=lambda s: (bool(self.is_float[s]), s))

    def check(self, rows: SampleRows) -> bool:
        """Whether rows from another process have this layout."""
        return bool(batches.are_whole(rows.words, rows.starts, self.dims, self.sizes))

    def batch(self, selections: Sequence[RowSelection]) -> Batch:
        """A batch of all selected rows, in their order. It owns its memory."""
        num_samples = sum(len(selection.order) for selection in selections)
        counts = np.zeros(len(self.slots), np.int64)
        if (self.dims < 0).any():
            for rows, order in selections:
                batches.count_values(rows.words, rows.starts, order, self.dims, self.sizes, counts)
        else:
            counts[:] = self.dims * num_samples
        sizes = counts * self.sizes
        firsts = np.zeros(len(self.slots), np.int64)
        firsts[self._order] = np.cumsum([0, *sizes[self._order][:-1]])
        memory = np.empty((int(sizes.sum()) + 1) // 2, np.uint64).view(np.uint32)
        offsets = np.empty((int(self.ragged.max()) + 1, num_samples), np.int64)
        ats, first = firsts.copy(), 0
        for rows, order in selections:
            batches.fill(
                rows.words, rows.starts, order, self.dims, self.sizes, self.ragged, ats, memory, first, firsts, offsets
            )
            first += len(order)
        return Batch(self._views(memory, firsts, sizes, offsets, num_samples), num_samples)

    def _views(
        self,
        memory: npt.NDArray[np.uint32],
        firsts: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        num_samples: int,
    ) -> dict[str, torch.Tensor | Ragged]:
        """Views of the memory by slot. One split per dtype: a slice per slot would take as long as filling them."""
        values: dict[int, torch.Tensor] = {}
        for dtype, size in (("int64", 2), ("float32", 1)):
            slots = [s for s in self._order if self.slots[s].dtype == dtype]
            if slots:
                start, stop = firsts[slots[0]], firsts[slots[-1]] + sizes[slots[-1]]
                whole = torch.from_numpy(memory[start:stop].view(DTYPES[dtype]))
                values.update(zip(slots, torch.split(whole, (sizes[slots] // size).tolist()), strict=True))
        starts = torch.from_numpy(offsets).unbind(0)
        return {
            slot.name: values[s].view(num_samples, slot.dim)
            if slot.dim is not None
            else Ragged(values[s], starts[self.ragged[s]])
            for s, slot in enumerate(self.slots)
        }
