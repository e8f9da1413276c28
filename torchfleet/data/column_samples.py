"""Samples as columns, one per slot: cut, joined and reordered without access to single samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.data.slots import Ragged

Index = npt.NDArray[np.int64]


class Lists(NamedTuple):
    """Any number of values per sample: those of sample i are values[offsets[i] : offsets[i + 1]]."""

    values: torch.Tensor
    offsets: Index  # one more than there are samples; the first is 0

    def part(self, start: int, stop: int) -> Lists:
        bounds = self.offsets[start : stop + 1]
        return Lists(self.values[bounds[0] : bounds[-1]], bounds - bounds[0] if bounds[0] else bounds)

    def picked(self, order: Index) -> Lists:
        lengths = np.diff(self.offsets)[order]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[order] - offsets[:-1], lengths)
        return Lists(self.values[torch.from_numpy(index)], offsets)

    @staticmethod
    def joined(parts: Sequence[Lists]) -> Lists:
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return Lists(torch.cat([part.values for part in parts]), np.concatenate(([0], np.cumsum(lengths))))


Column = torch.Tensor | Lists  # a tensor: (samples, dim)


class ColumnSamples:
    """Samples by slot. Slices share the memory of the whole."""

    def __init__(self, columns: dict[str, Column], num: int) -> None:
        self.columns, self.num = columns, num

    def part(self, start: int, stop: int) -> ColumnSamples:
        """The samples from `start` to `stop`, in the same memory."""
        if (start, stop) == (0, self.num):
            return self
        parts = {
            name: column.part(start, stop) if isinstance(column, Lists) else column[start:stop]
            for name, column in self.columns.items()
        }
        return ColumnSamples(parts, stop - start)

    def picked(self, order: Index) -> ColumnSamples:
        """A copy of the samples with these indices, in this order."""
        index = torch.from_numpy(order)
        picked: dict[str, Column] = {
            name: column.picked(order) if isinstance(column, Lists) else column[index]
            for name, column in self.columns.items()
        }
        return ColumnSamples(picked, len(order))

    @staticmethod
    def joined(parts: Sequence[ColumnSamples]) -> ColumnSamples:
        """All parts, concatenated: a copy, unless there is only one."""
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, Column] = {}
        for name in parts[0].columns:
            own: list[Any] = [part.columns[name] for part in parts]
            columns[name] = Lists.joined(own) if isinstance(own[0], Lists) else torch.cat(own)
        return ColumnSamples(columns, sum(part.num for part in parts))

    def slots(self) -> dict[str, torch.Tensor | Ragged]:
        """The slots as in a batch."""
        return {
            name: Ragged(column.values, torch.from_numpy(column.offsets[:-1])) if isinstance(column, Lists) else column
            for name, column in self.columns.items()
        }
