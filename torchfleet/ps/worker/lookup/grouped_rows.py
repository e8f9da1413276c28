"""Tables of one width that a batch looks up once each: one pass finds their distinct keys, one function of autograd
gathers their rows, and one sums their gradients.

A model with many small tables spends its time on the calls of each table, not on its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.ps.kernels import lookup
from torchfleet.ps.kernels.merge import SALT, unique_parts
from torchfleet.ps.kernels.rows import gather
from torchfleet.ps.worker.batch.foresight import Expected
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.batch_rows import BatchRows, Index
from torchfleet.ps.worker.lookup.sources import Embedding

MOST_IDS = 8192  # of one table; the distinct keys of more are found by several threads
_ANY = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DistinctParts:
    """The distinct keys of several tables, one table after the other."""

    keys: Keys
    starts: list[int]  # where each table's keys start, and where the last ones end
    ends: list[int]  # where each table's ids end, duplicates included
    index: Index  # by id: the position of its key among `keys`
    own: Index  # by id: the position of its key among those of its table
    are_below: bool  # all keys are below the sizes of their tables

    @classmethod
    def of(cls, ids: Sequence[Keys], sizes: Sequence[int | None]) -> DistinctParts:
        """`sizes`: by table, the number of ids that it has; None: any id."""
        counts = list(map(len, ids))
        ends = np.cumsum(counts)
        keys: Keys = np.concatenate(ids)
        num = len(keys)
        distinct, starts = np.empty(num, np.uint64), np.empty(len(ids) + 1, np.int64)
        index: npt.NDArray[np.int32] = np.empty((2, num), np.int32)
        places = np.empty(1 << max(4, (2 * max(counts) - 1).bit_length()), np.int32)
        limits = np.array([_ANY if size is None else size for size in sizes], np.uint64)
        are_below = unique_parts(keys, ends, limits, places, distinct, starts, index[0], index[1], SALT)
        return cls(distinct[: starts[-1]], starts.tolist(), ends.tolist(), index[0], index[1], are_below)


class GroupedRows:
    """The rows of several tables of one width, by their number in the group."""

    def __init__(self, rows: Sequence[BatchRows], weights: Sequence[torch.Tensor], parts: DistinctParts) -> None:
        self.rows, self.weights, self._parts = list(rows), tuple(weights), parts
        # by table: the shape of its ids behind the first dimension, if known. A view would be a function of its own.
        self.suffixes: Sequence[tuple[int, ...]] = [()] * len(self.rows)

    def looked_up(self) -> Sequence[torch.Tensor]:
        """By table: the rows of its ids, in their order, (ids, *suffix, dim). The graph holds this group: who keeps the
        result in it makes a circle.
        """
        found: Sequence[torch.Tensor] = _GroupedLookup.apply(self, *self.weights)  # type: ignore[no-untyped-call]
        return found

    def gathered(self) -> list[torch.Tensor]:
        """By table: the rows of its ids."""
        dim, index = self.rows[0].dim, self._parts.index
        nums = [
            stop - start for start, stop in pairwise(self._parts.starts)
        ]  # other lookups may have added rows behind
        values: Floats = np.concatenate([rows.values[:num] for rows, num in zip(self.rows, nums, strict=True)])
        out = np.empty((len(index), dim), np.float32)
        gather(values.reshape(-1), dim, 0, index, out)
        found, first = [], 0
        for end, suffix in zip(self._parts.ends, self.suffixes, strict=True):
            own = out[first:end]
            if suffix and not (end - first) % math.prod(suffix):
                own = own.reshape(-1, *suffix, dim)
            found.append(torch.from_numpy(own))
            first = end
        return found

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of the outputs; None for tables that have none."""
        starts = self._parts.starts
        is_fresh = all(
            grad is not None and rows.takes_first_sums(stop - start)
            for grad, rows, (start, stop) in zip(grads, self.rows, pairwise(starts), strict=True)
        )
        if not is_fresh:
            self._add_each(grads)
            return
        dim = self.rows[0].dim
        flat: Floats = _side_by_side(grads, dim).detach().numpy()  # type: ignore[arg-type]
        sums = np.full((starts[-1], dim), lookup.NOTHING, np.float32)
        touched = np.empty(starts[-1], np.bool_)
        lookup.add_rows(flat.reshape(-1), dim, dim, self._parts.index, sums.reshape(-1), touched)
        for rows, (start, stop) in zip(self.rows, pairwise(starts), strict=True):
            rows.take_first_sums(sums[start:stop])

    def _add_each(self, grads: Sequence[torch.Tensor | None]) -> None:
        first = 0
        for rows, grad, end in zip(self.rows, grads, self._parts.ends, strict=True):
            if grad is not None:
                rows.add(self._parts.own[first:end], grad.reshape(-1, rows.dim))
            first = end


def _side_by_side(grads: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The gradients of all tables, one after the other."""
    suffix = grads[0].shape[1:]
    for grad in grads:
        if grad.shape[1:] != suffix:
            return torch.cat([own.reshape(-1, dim) for own in grads])
    return torch.cat(list(grads))


def groups_of(
    expected: Mapping[str, Expected],
    groupable: Mapping[str, Embedding],
    new_rows: Callable[[str], BatchRows],
) -> Iterator[tuple[list[str], GroupedRows]]:
    """The groups of a batch with these predicted lookups: (tables, their rows), with keys and without values.

    `groupable`: the layers of the tables that may be in a group. A group with a wrong prediction is left out: what is
    wrong with its ids is found by the lookup of each table.
    """
    by_dim: dict[int, list[str]] = {}
    layers: dict[str, tuple[Embedding, torch.Tensor]] = {}
    with torch._C.DisableTorchFunctionSubclass():  # the weights' properties are read
        for table, found in expected.items():
            layer = groupable.get(table)
            if layer is None or not layer.training or len(found.slots) > 1 or found.slots[0][0].padding_idx is not None:
                continue
            weight = layer.weight
            if weight.requires_grad and weight.is_cpu:
                layers[table] = layer, weight
                by_dim.setdefault(layer.dim, []).append(table)
    known: dict[Any, DistinctParts] = {}  # layers of several widths with the same ids share their keys
    for tables in by_dim.values():
        ids = [expected[table].keys for table in tables]
        if len(tables) == 1 or not 0 < min(map(len, ids)) <= max(map(len, ids)) <= MOST_IDS:
            continue
        sizes = tuple([layers[table][0].num_embeddings for table in tables])
        origin = sizes, tuple([expected[table].slots[0][0].origin for table in tables])
        parts = known[origin] = known.get(origin) or DistinctParts.of(ids, sizes)
        if parts.are_below:
            weights = [layers[table][1] for table in tables]
            yield tables, GroupedRows(_begin(tables, expected, parts, new_rows), weights, parts)


def _begin(
    tables: Sequence[str],
    expected: Mapping[str, Expected],
    parts: DistinctParts,
    new_rows: Callable[[str], BatchRows],
) -> list[BatchRows]:
    """By table: its rows, with keys and without values."""
    begun, first = [], 0
    for table, (start, stop), end in zip(tables, pairwise(parts.starts), parts.ends, strict=True):
        rows = new_rows(table)
        rows.expect_part(parts.keys[start:stop], parts.own[first:end], *expected[table].stamped)
        begun.append(rows)
        first = end
    return begun


class GroupPlace(NamedTuple):
    """A table's place in a group."""

    group: GroupedRows
    number: int
    outputs: list[torch.Tensor]  # of the group, filled by the first lookup

    @property
    def rows(self) -> BatchRows:
        return self.group.rows[self.number]

    def output(self) -> torch.Tensor:
        """The rows of the table's ids, in their order: (ids, *suffix, dim)."""
        if not self.outputs:
            self.outputs.extend(self.group.looked_up())
        return self.outputs[self.number]


class _GroupedLookup(torch.autograd.Function):
    """Values of rows, one output per table."""

    @staticmethod
    def forward(ctx: Any, group: GroupedRows, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.num = group, len(weights)
        ctx.set_materialize_grads(False)
        return tuple(group.gathered())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.group.add(grads)
        nothing: tuple[None, ...] = (None,) * (1 + ctx.num)
        return nothing
