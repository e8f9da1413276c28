"""The distinct keys of several tables, found in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.merge import SALT, unique_parts
from torchfleet.ps.worker.client.shard import Keys
from torchfleet.ps.worker.lookup.batch_rows import Index

_ANY = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DistinctParts:
    """The ids and distinct keys of several tables, one table after the other."""

    ids: Keys  # a copy: the batch's may change
    counts: list[int]  # of ids, by table
    firsts: list[int]  # where each table's ids begin, and where the last ones end
    keys: Keys
    starts: list[int]  # where each table's keys start, and where the last ones end
    index: Index  # by id: the position of its key among `keys`
    own: Index  # by id: the position of its key among the keys of its table
    are_below: bool  # all keys are below the sizes of their tables

    @classmethod
    def of(cls, ids: Sequence[Keys], sizes: Sequence[int | None]) -> DistinctParts:
        """`sizes`: by table, the number of ids that it has; None: any id."""
        return cls.of_joined(np.concatenate(ids), list(map(len, ids)), limits_of(sizes))

    @classmethod
    def of_joined(cls, ids: Keys, counts: list[int], limits: Keys) -> DistinctParts:
        """From the ids of all tables, one table after the other. `limits`: from `limits_of`."""
        firsts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=firsts[1:])
        num = len(ids)
        distinct, starts = np.empty(num, np.uint64), np.empty(len(counts) + 1, np.int64)
        index: npt.NDArray[np.int32] = np.empty((2, num), np.int32)
        places = np.empty(1 << max(4, (2 * max(counts) - 1).bit_length()), np.int32)
        are_below = unique_parts(ids, firsts[1:], limits, places, distinct, starts, index[0], index[1], SALT)
        found = distinct[: starts[-1]], starts.tolist(), index[0], index[1], are_below
        return cls(ids, counts, firsts.tolist(), *found)

    def ids_of(self, number: int) -> Keys:
        """The ids of a table."""
        return self.ids[self.firsts[number] : self.firsts[number + 1]]

    def own_of(self, number: int) -> Index:
        """`own` of a table's ids."""
        return self.own[self.firsts[number] : self.firsts[number + 1]]


def limits_of(sizes: Sequence[int | None]) -> Keys:
    """By table: all its ids are below this number. `sizes`: None for any id."""
    return np.array([_ANY if size is None else size for size in sizes], np.uint64)
