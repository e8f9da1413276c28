"""The tensors in what a model returns: a tensor, lists, tuples, dicts, dataclasses or objects with attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], outputs: Any) -> Any:
    """The same structure with every tensor replaced by `change` of it."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, _PLAIN) or not hasattr(leaf, "__dict__") or isinstance(leaf, type):
            return leaf
        made = copy.copy(leaf)
        for name, value in vars(leaf).items():
            object.__setattr__(made, name, tree_map(of_leaf, value))
        return made

    return tree_map(of_leaf, outputs)


def tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """All tensors in it, in order."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, _PLAIN) and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            for value in vars(leaf).values():
                yield from tensors(value)
