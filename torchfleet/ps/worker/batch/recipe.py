"""Recipes: ids as functions of a batch's tensors, replayed on every batch.

A recipe is a small graph. Its leaves are tensors of the batch and constants. A constant is the tensor itself, not a
copy, so a replay reads the current value of a buffer. Sizes of the recorded batch are replaced by those of the current
batch. A recipe is a guess: its user compares the result with the actual lookup.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchfleet.ps.worker.batch.window import Window

PLAIN = (bool, int, float, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SLICE, _ARANGE = "aten::slice", "aten::arange"


@dataclass(frozen=True)
class Input:
    """A tensor of the batch, or a window on it."""

    place: str
    window: Window


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that no recorded function made: a buffer, or a literal in forward."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a torch function on other nodes; `output`: the index of the result, if there are several."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None
    size: int  # number of functions in the graph that ends here

    @cached_property
    def has_named_tensors(self) -> bool:
        return any(not isinstance(value, PLAIN) for value in self.kwargs.values())


Node = Input | Constant | Result


@dataclass(frozen=True)
class Recipe:
    """How ids are computed. `shapes`: the shapes of the batch's tensors at the recording, by their places."""

    root: Node  # from a Shelf: recipes with the same root are equal
    shapes: Mapping[str, torch.Size] = field(default_factory=dict, compare=False)

    @cached_property
    def places(self) -> set[str]:
        """Places of the tensors from which the ids are computed."""
        return {self.root.place} if isinstance(self.root, Input) else set(self.shapes)

    @cached_property
    def is_computed(self) -> bool:
        """Whether the ids are more than a view of the batch's own memory."""
        return not isinstance(self.root, Input)

    @cached_property
    def makes_memory(self) -> bool:
        """Whether the ids lie in memory that nothing else refers to."""
        return isinstance(self.root, Result) and all(out.alias_info is None for out in self.root.func._schema.returns)


def nearest(places: Iterable[Input]) -> Input | None:
    """The best guess among places where a tensor may lie. Slots of a batch may share their memory: a whole tensor is
    better than a window on another, and a place in the model's call is better than one in a prefetched batch.
    """
    return min(places, key=lambda at: (at.window.sizes is not None, not at.place.startswith("call")), default=None)


class Sizes(NamedTuple):
    """Sizes that changed since the recording, old to new: in the first dimension of inputs, and in the others."""

    first: dict[int, int]
    others: dict[int, int]


class CannotReplay(Exception):
    """This batch differs too much from the recorded one."""


@dataclass
class Replay:
    """Replays recipes on one batch. Parts that several recipes share are computed once."""

    tensors: Mapping[str, torch.Tensor]
    # By the id() of a node; the value keeps the node alive.
    _done: dict[int, tuple[Node, Any]] = field(default_factory=dict)

    def ids(self, recipe: Recipe) -> torch.Tensor:
        """The ids. Raises any exception if they cannot be computed from this batch."""
        known = self._done.get(id(recipe.root))
        if known is not None:
            ids = known[1]
        elif isinstance(recipe.root, Input):
            return self._input(recipe.root)
        else:
            with torch.no_grad():
                ids = self._value(recipe.root, self._sizes(recipe.shapes))
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point():
            raise CannotReplay("no whole numbers")
        return ids

    def _sizes(self, shapes: Mapping[str, torch.Size]) -> Sizes | None:
        """Sizes that differ from the recorded ones; None if all are the same."""
        sizes: Sizes | None = None
        for place, old in shapes.items():
            if place not in self.tensors:
                raise CannotReplay(f"nothing at {place}")
            new = self.tensors[place].shape
            if new == old:
                continue
            if len(new) != len(old):
                raise CannotReplay(f"{len(new)} dimensions at {place}, not {len(old)}")
            sizes = sizes or Sizes({}, {})
            for dim, (before, now) in enumerate(zip(old, new, strict=True)):
                known = sizes.others if dim else sizes.first
                if before != now and known.setdefault(before, now) != now:
                    raise CannotReplay(f"a size of {before} became {known[before]} and {now}")
        return sizes

    def _input(self, node: Input) -> torch.Tensor:
        tensor = self.tensors.get(node.place)
        if tensor is None:
            raise CannotReplay(f"nothing at {node.place}")
        part = tensor if node.window.sizes is None else node.window.on(tensor)
        if part is None:
            raise CannotReplay(f"another layout at {node.place}")
        return part

    def _value(self, node: Node, sizes: Sizes | None) -> Any:
        if isinstance(node, Constant):
            return node.tensor
        known = self._done.get(id(node))
        if known is not None:
            return known[1]
        value = self._input(node) if isinstance(node, Input) else self._result(node, sizes)
        self._done[id(node)] = node, value
        return value

    def _result(self, node: Result, sizes: Sizes | None) -> Any:
        def value(found: Any) -> Any:
            return self._value(found, sizes) if isinstance(found, (Input, Constant, Result)) else found

        args = tuple([in_nests(value, arg) if isinstance(arg, (list, tuple)) else value(arg) for arg in node.args])
        kwargs = in_nests(value, node.kwargs) if node.has_named_tensors else node.kwargs
        out = node.func(*(args if sizes is None else _resized(node.func, args, sizes)), **kwargs)
        return out if node.output is None else out[node.output]


def in_nests(change: Callable[[Any], Any], found: Any) -> Any:
    """Apply `change` to each argument of a function, including those in lists."""
    if isinstance(found, (list, tuple)):
        return type(found)([in_nests(change, value) for value in found])
    if isinstance(found, dict):
        return {name: in_nests(change, value) for name, value in found.items()}
    return change(found)


def _resized(func: torch._ops.OpOverload, args: tuple[Any, ...], sizes: Sizes) -> tuple[Any, ...]:
    """The arguments of a function, with sizes replaced by those of this batch."""
    name, changed = func._schema.name, list(args)
    for i, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
        if argument.name == "size" and isinstance(value, (list, tuple)):
            changed[i] = _resized_list([int(number) for number in value], sizes)
        elif name == _ARANGE and isinstance(value, int):
            changed[i] = sizes.first.get(value, sizes.others.get(value, value))
        elif name == _SLICE and argument.name in ("start", "end"):
            dim = args[1] if len(args) > 1 else 0
            changed[i] = (sizes.others if dim else sizes.first).get(value, value)
    return tuple(changed)


def _resized_list(shape: list[int], sizes: Sizes) -> list[int]:
    """A shape in which the first number equal to the old size, or else a multiple of it, is replaced by the new one."""
    for old, new in (*sizes.first.items(), *sizes.others.items()):
        place = next((i for i, number in enumerate(shape) if number == old), None)
        if place is None and old > 0:
            place = next((i for i, number in enumerate(shape) if number > old and number % old == 0), None)
        if place is not None:
            shape[place] = shape[place] // max(1, old) * new
    return shape


class Shelf:
    """The nodes of all live recipes, each once: recipes that begin alike share nodes."""

    def __init__(self) -> None:
        self._nodes: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()

    def put(self, node: Node) -> Node:
        """The shared node that equals this one."""
        if isinstance(node, Result):
            args, kwargs = in_nests(self._child, node.args), in_nests(self._child, node.kwargs)
            node = Result(node.func, args, kwargs, node.output, node.size)
        return self._nodes.setdefault(_key(node), node)

    def _child(self, found: Any) -> Any:
        return self.put(found) if isinstance(found, (Input, Constant, Result)) else found


def _key(node: Node) -> Any:
    if isinstance(node, Input):
        return node
    if isinstance(node, Constant):
        return id(node.tensor)  # the node keeps the tensor alive
    return node.func, _hashable(node.args), _hashable(node.kwargs), node.output


def _hashable(found: Any) -> Any:
    if isinstance(found, (list, tuple)):
        return tuple(map(_hashable, found))
    if isinstance(found, dict):
        return tuple((name, _hashable(value)) for name, value in found.items())
    return id(found) if isinstance(found, (Constant, Result)) else (type(found), found)
