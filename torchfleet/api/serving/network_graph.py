"""A network as a list of torch's operations, in JSON: reading it runs no code from the file.

Values are numbered: inputs first, then parameters, constants, and the results of the nodes in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import torch

from torchfleet.api.serving.operation_checks import DTYPES, check_arguments, operation
from torchfleet.base.errors import ModelError

ROWS, POOLED = "torchfleet.rows", "torchfleet.pooled"
MAX_CONSTANT = 1 << 16  # elements of all constants together


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One operation. An argument that is another value is {"value": number}, a list {"list": [...]}."""

    op: str
    args: list[Any]
    kwargs: dict[str, Any] = {}


class GraphInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor of a batch: all values of a feature, or the offset of each sample's first value in a ragged feature."""

    feature: str
    part: Literal["values", "offsets"] = "values"


class GraphOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result, with one entry of `shape` per sample."""

    name: str
    value: int
    dtype: str
    shape: list[int]


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data: list[Any]


class NetworkGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole network."""

    inputs: list[GraphInput]
    parameters: list[str]  # names of the model's state_dict
    constants: list[Constant]
    nodes: list[Node]
    outputs: list[GraphOutput]

    @property
    def num_given(self) -> int:
        """The number of inputs, parameters and constants; the values of the nodes follow them."""
        return len(self.inputs) + len(self.parameters) + len(self.constants)


class Value(int):
    """The number of a value, in the arguments of a step."""


class Step:
    """An operation that is ready to run."""

    def __init__(self, node: Node, number: int) -> None:
        """Raises ModelError for an operation, or an argument of it, that a saved network may not have."""
        self.op, self.number = node.op, number
        self.function: Callable[..., Any] | None = None if node.op in (ROWS, POOLED) else operation(node.op)
        self.args = tuple(_argument(arg, number) for arg in node.args)
        self.kwargs = {name: _argument(arg, number) for name, arg in node.kwargs.items()}
        if self.function is not None:
            check_arguments(node.op, self.args, self.kwargs)

    def sources(self) -> list[int]:
        """The numbers of the values that the operation reads."""
        return [*_values_in(self.args), *_values_in(list(self.kwargs.values()))]

    def run(self, values: list[Any]) -> None:
        assert self.function is not None
        args = [filled(arg, values) for arg in self.args]
        if self.kwargs:
            kwargs = {name: filled(arg, values) for name, arg in self.kwargs.items()}
            values[self.number] = self.function(*args, **kwargs)
        else:
            values[self.number] = self.function(*args)


def filled(arg: Any, values: Sequence[Any]) -> Any:
    """An argument with its values in place."""
    if type(arg) is Value:
        return values[arg]
    return [filled(part, values) for part in arg] if type(arg) is list else arg


def steps_of(graph: NetworkGraph) -> list[Step]:
    """The operations of a graph. Raises ModelError for one that is not allowed."""
    return [Step(node, graph.num_given + i) for i, node in enumerate(graph.nodes)]


def constants_of(graph: NetworkGraph) -> list[torch.Tensor]:
    if sum(len(constant.data) for constant in graph.constants) > MAX_CONSTANT:
        raise ModelError(f"the network has more than {MAX_CONSTANT:,} constant numbers")
    try:
        return [
            torch.tensor(constant.data, dtype=dtype_named(constant.dtype)).view(constant.shape)
            for constant in graph.constants
        ]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"a constant of the network cannot be read: {error}") from None


def dtype_named(name: str) -> torch.dtype:
    """Raises ModelError for a type that a saved network may not have."""
    if name not in DTYPES:
        raise ModelError(f"expected one of {', '.join(DTYPES)} as a tensor's type, found {name!r:.40}")
    found: torch.dtype = getattr(torch, name)
    return found


def encoded(arg: Any, number_of: Callable[[Any], int]) -> Any:
    """An argument of a traced node as JSON. `number_of` gives the number of a node."""
    if isinstance(arg, (list, tuple)):
        return {"list": [encoded(part, number_of) for part in arg]}
    if isinstance(arg, torch.fx.Node):
        return {"value": number_of(arg)}
    if isinstance(arg, torch.device):
        return {"device": "cpu"}
    if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)):
        return {type(arg).__name__: str(arg).removeprefix("torch.")}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if isinstance(arg, (bool, int, float, str, type(None))):
        return arg
    raise ModelError(f"an argument of type {type(arg).__name__}, {arg!r:.60}, cannot be saved")


def _argument(arg: Any, before: int) -> Any:
    """The inverse of `encoded`. A value must have a number below `before`."""
    if isinstance(arg, (bool, int, float, str, type(None))):
        return arg
    kind, given = next(iter(arg.items())) if isinstance(arg, dict) and len(arg) == 1 else ("", None)
    if kind == "list" and isinstance(given, list):
        return [_argument(part, before) for part in given]
    if kind == "value" and type(given) is int and 0 <= given < before:
        return Value(given)
    if kind == "float" and given in ("inf", "-inf", "nan"):
        return float(given)
    if kind == "device" and given == "cpu":
        return torch.device("cpu")
    if kind in ("dtype", "layout", "memory_format") and isinstance(given, str):
        found = dtype_named(given) if kind == "dtype" else getattr(torch, given, None)
        if isinstance(found, getattr(torch, kind)):
            return found
    raise ModelError(f"an argument of the network cannot be read: {arg!r:.80}")


def _values_in(arg: Any) -> list[int]:
    if type(arg) is Value:
        return [int(arg)]
    return [value for part in arg for value in _values_in(part)] if isinstance(arg, (list, tuple)) else []
