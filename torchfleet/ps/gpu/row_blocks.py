"""Rows of a table on a device as blocks: what a save writes and a load brings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.ps.gpu.row_layout import RowLayout

Columns = dict[str, torch.Tensor]  # statistics by name, one number per row: float32, or int32 with the bits of uint32
_FLOATS = ("show", "click", "delta")


class RowBlock(NamedTuple):
    """Some rows, on the table's device."""

    keys: torch.Tensor  # int64
    slots: torch.Tensor
    words: torch.Tensor  # (rows, num_words) float32: values, then optimizer state
    columns: Columns

    def arrays(self, num_words: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """As tables/table.SavedSlice of kind "rows" has them; `num_words`: only the first words of each row."""
        found = {"keys": self.keys.cpu().numpy().view(np.uint64), "rows": self.words[:, :num_words].cpu().numpy()}
        for name, column in self.columns.items():
            array = np.ascontiguousarray(column.cpu().numpy())
            found[name] = array if name in _FLOATS else array.view(np.uint32)
        return found


def split(layout: RowLayout, keys: torch.Tensor, slots: torch.Tensor, words: torch.Tensor) -> RowBlock:
    """A block of whole rows."""
    columns = {}
    for place, name in enumerate(layout.columns, layout.num_words):
        column = words[:, place].contiguous()
        columns[name] = column if name in _FLOATS else column.view(torch.int32)
    return RowBlock(keys, slots, words[:, : layout.num_words], columns)


def joined(layout: RowLayout, columns: Columns) -> torch.Tensor:
    """Statistics side by side, as float32 words; a column that is not given is zeros."""
    num = len(next(iter(columns.values())))
    block = torch.zeros(num, len(layout.columns), dtype=torch.float32)
    for place, name in enumerate(layout.columns):
        if name in columns:
            column = columns[name].cpu()
            block[:, place] = column.float() if name in _FLOATS else column.int().view(torch.float32)
    return block


def last_of_each(slots: torch.Tensor) -> torch.Tensor:
    """Places of the last occurrence of every slot."""
    ordered, places = torch.sort(slots, stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return places[is_last]
