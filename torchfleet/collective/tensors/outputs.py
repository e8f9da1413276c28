"""The tensors in what a model returns: a tensor, lists, tuples, dicts, dataclasses or objects with attributes."""

from __future__ import annotations

import copy
import dataclasses
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
        if not _has_parts(leaf):
            return leaf
        made = copy.copy(leaf)
        for name, value in _attributes(leaf):
            object.__setattr__(made, name, tree_map(of_leaf, value))
        if isinstance(leaf, dict):  # a type that torch's pytree does not know
            for key, value in leaf.items():
                dict.__setitem__(made, key, tree_map(of_leaf, value))
        return made

    return tree_map(of_leaf, outputs)


def tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """All tensors in `outputs`, in order."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif _has_parts(leaf):
            for _, value in _attributes(leaf):
                yield from tensors(value)
            if isinstance(leaf, dict):
                yield from tensors(list(leaf.values()))


def _has_parts(leaf: Any) -> bool:
    if isinstance(leaf, (*_PLAIN, type)):
        return False
    return hasattr(leaf, "__dict__") or dataclasses.is_dataclass(leaf)


def _attributes(leaf: Any) -> list[tuple[str, Any]]:
    """The attributes of an object; the fields of a dataclass with slots."""
    if hasattr(leaf, "__dict__"):
        return list(vars(leaf).items())
    return [(field.name, getattr(leaf, field.name)) for field in dataclasses.fields(leaf)]
