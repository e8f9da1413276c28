"""Groups of tables whose ids are columns of one block: what is the same for all batches is computed once."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.ps.worker.batch.columns import Block, Blocks
from torchfleet.ps.worker.batch.foresight import Way
from torchfleet.ps.worker.lookup.distinct_parts import DistinctParts, limits_of
from torchfleet.ps.worker.lookup.grouped_rows import MOST_IDS, GroupedRows, NewRows, may_train
from torchfleet.ps.worker.lookup.sources import Embedding


class _ColumnGroup:
    """Tables of one width, and the column of each in their block."""

    def __init__(self, ways: Sequence[Way], layers: Sequence[Embedding], block: Block) -> None:
        self.ways, self.layers, self.block = ways, layers, block
        columns = [way.shared.first for way in ways if way.shared is not None]
        self.columns: npt.NDArray[np.int64] = np.array(columns, np.int64)
        self.sizes = [layer.num_embeddings for layer in layers]
        self.limits = limits_of(self.sizes)
        self.origin = self.sizes, columns, id(block)  # groups with the same origin have the same ids

    def parts(self, blocks: Blocks) -> DistinctParts | None:
        """The keys of a batch; None if their number does not suit a group. May raise any exception if the batch has no
        such block."""
        ids = blocks.whole(self.block)[self.columns]
        num = ids.shape[1]
        if not 0 < num <= MOST_IDS:
            return None
        return DistinctParts.of_joined(ids.reshape(-1).view(np.uint64), [num] * len(self.ways), self.limits)


class ColumnGroups:
    """The groups that these ways form; `others`: the ways that are in no group."""

    def __init__(self, ways: Sequence[Way], groupable: Mapping[str, Embedding]) -> None:
        self.ways = ways
        by_kind: dict[Any, list[Way]] = {}
        tables = [way.table for way in ways]
        for way in ways:
            column = way.shared
            if column is None or column.num > 1 or way.padding_idx is not None or tables.count(way.table) > 1:
                continue
            if way.table in groupable:
                by_kind.setdefault((groupable[way.table].dim, id(column.block)), []).append(way)
        found = [own for own in by_kind.values() if len(own) > 1]
        self._groups = [_ColumnGroup(own, [groupable[way.table] for way in own], _block_of(own)) for own in found]
        grouped = {way.table for own in found for way in own}
        self.others = tuple([way for way in ways if way.table not in grouped])

    def of(self, blocks: Blocks, new_rows: NewRows, pending: list[Any]) -> list[GroupedRows] | None:
        """The groups of a batch, with keys and without values; None if one of them cannot be made for this batch."""
        with torch._C.DisableTorchFunctionSubclass():  # the weights' properties are read
            for group in self._groups:
                if not all(map(_is_awake, group.ways)) or not all(map(may_train, group.layers)):
                    return None
        made: list[GroupedRows] = []
        known: list[tuple[Any, DistinctParts]] = []
        for group in self._groups:
            parts = next((parts for origin, parts in known if origin == group.origin), None)
            if parts is None:
                try:
                    parts = group.parts(blocks)
                except Exception:  # torch functions may raise anything; Foresight.keys then tries and notes each way
                    return None
                if parts is None or not parts.are_below:
                    return None
                known.append((group.origin, parts))
            made.append(GroupedRows(group.ways, group.layers, parts, new_rows, pending))
        return made


_is_awake = operator.attrgetter("is_awake")


def _block_of(ways: Sequence[Way]) -> Block:
    assert ways[0].shared is not None
    return ways[0].shared.block
