"""Columns of one block: if a model uses many of them with the same functions, all are computed at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.ps.worker.batch.recipe import PLAIN, CannotReplay, Input, Node, Recipe, Replay, Result
from torchfleet.ps.worker.batch.window import Window
from torchfleet.ps.worker.client.shard import Keys, as_keys

_EACH_NUMBER = ("aten::_to_copy", "aten::floor_divide")  # besides functions that torch tags as pointwise


class Block(NamedTuple):
    """A two-dimensional tensor of the batch, and elementwise functions to apply to it in order."""

    place: str
    width: int
    steps: tuple[tuple[torch._ops.OpOverload, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]


class Column(NamedTuple):
    """A few adjacent columns of a block."""

    block: Block
    first: int
    num: int


def column_of(recipe: Recipe) -> Column | None:
    """The columns from which a recipe computes ids elementwise; None if it does anything else."""
    node: Node = recipe.root
    steps: list[tuple[Any, ...]] = []
    while isinstance(node, Result):
        first, *others = node.args
        if not isinstance(first, (Input, Result)) or not _is_each_number(node):
            return None
        steps.append((node.func, tuple(others), tuple(node.kwargs.items())))
        node = first
    if not isinstance(node, Input) or not steps:
        return None
    window, width = node.window, (node.window.base_strides or (0,))[0]
    if window.base_strides != (width, 1) or window.strides not in ((width,), (width, 1)):
        return None
    num = (window.sizes or (1,))[0]
    return Column(Block(node.place, width, tuple(reversed(steps))), window.offset, num)


def _is_each_number(node: Result) -> bool:
    is_known = torch.Tag.pointwise in node.func.tags or node.func._schema.name in _EACH_NUMBER
    others = (*node.args[1:], *node.kwargs.values())
    return is_known and all(isinstance(value, PLAIN) for value in others) and "memory_format" not in node.kwargs


def worth_it(columns: Iterable[Column]) -> set[Block]:
    """Blocks with enough used columns that computing the whole block is cheaper than computing these columns one by
    one.
    """
    used = Counter[Block]()
    for column in set(columns):
        used[column.block] += column.num
    return {block for block, num in used.items() if 4 * num >= block.width}


@dataclass
class Blocks:
    """The blocks of one batch, each computed when its first column is requested. Equal blocks must be one object."""

    _replay: Replay
    _done: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)  # by id(): hashing a block takes longer

    def keys(self, column: Column) -> Keys:
        """The keys of these columns, sample by sample. May raise any exception if this batch has no such block."""
        own = self.whole(column.block)[column.first : column.first + column.num]
        return as_keys(own[0] if column.num == 1 else own.T)

    def whole(self, block: Block) -> npt.NDArray[np.int64]:
        """All columns of a block, each a row of the result. Raises as `keys` does."""
        found = self._done.get(id(block))
        if found is None:
            found = self._done[id(block)] = self._computed(block)
        return found

    def _computed(self, block: Block) -> npt.NDArray[np.int64]:
        base = self._replay.ids(Recipe(Input(block.place, Window())))
        if base.dim() != 2 or base.stride() != (block.width, 1) or base.size(1) != block.width:
            raise CannotReplay(f"another layout at {block.place}")
        value = base.t()
        with torch.no_grad():
            for func, args, kwargs in block.steps:
                value = func(value, *args, **dict(kwargs))
        if value.is_floating_point():
            raise CannotReplay("no whole numbers")
        found: npt.NDArray[np.int64] = value.cpu().contiguous().numpy()
        return found
