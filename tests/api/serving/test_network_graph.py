"""Graphs from a file: only operations of torch that return new tensors are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchfleet.api.serving.network_graph import (
    ROWS,
    Constant,
    GraphInput,
    GraphOutput,
    NetworkGraph,
    Node,
    Step,
    constants_of,
    encoded,
    steps_of,
)
from torchfleet.base.errors import ModelError


def graph_of(*nodes: Node, constants: tuple[Constant, ...] = ()) -> NetworkGraph:
    outputs = [GraphOutput("out", len(constants) + len(nodes), "float32", [])]
    return NetworkGraph([GraphInput("x")], [], list(constants), list(nodes), outputs)


@pytest.mark.parametrize(
    "op",
    [
        "aten.from_file.default",
        "aten.add_.Tensor",
        "aten.set_.source_Tensor",
        "aten.as_strided.default",
        "aten._unsafe_index.Tensor",
        "aten.relu",
        "aten.no_such.default",
        "prims.add.default",
        "os.system",
        "operator.attrgetter",
        "builtins.eval",
        "torchfleet.other",
        "",
    ],
)
def test_other_operations_are_refused(op: str) -> None:
    with pytest.raises(ModelError):
        steps_of(graph_of(Node(op, [{"value": 0}])))


@pytest.mark.parametrize(
    "arg",
    [
        {"value": 1},
        {"value": -1},
        {"value": True},
        {"value": 0, "list": []},
        {"dtype": "load"},
        {"device": "cuda"},
        {"float": "1"},
        {"layout": "float32"},
        {"list": 3},
        [1],
        {},
    ],
)
def test_other_arguments_are_refused(arg: Any) -> None:
    with pytest.raises(ModelError):
        Step(Node("aten.relu.default", [arg]), 1)


def test_steps_compute_with_all_kinds_of_arguments() -> None:
    nodes = [
        Node("aten.sym_size.int", [{"value": 0}, 0]),
        Node("operator.mul", [{"value": 1}, 2]),
        Node("aten.full.default", [{"list": [{"value": 2}, 3]}, {"float": "inf"}], {"dtype": {"dtype": "float32"}}),
        Node("aten.cat.default", [{"list": [{"value": 3}, {"value": 3}]}, 1]),
    ]
    values: list[Any] = [torch.zeros(4), None, None, None, None]
    for step in steps_of(graph_of(*nodes)):
        step.run(values)
    assert values[4].shape == (8, 6)
    assert bool(torch.isinf(values[4]).all())


def test_what_is_encoded_is_decoded_to_the_same() -> None:
    given = [1, 2.5, float("-inf"), None, True, "sum", torch.int64, torch.strided, torch.contiguous_format, [1, [2]]]
    node = Node(ROWS, [encoded(arg, lambda node: 0) for arg in given])
    assert list(Step(node, 1).args) == given
    with pytest.raises(ModelError):
        encoded(object(), lambda node: 0)


def test_wrong_constants_are_refused() -> None:
    for constant in (Constant("float32", [3], [1.0]), Constant("load", [1], [1.0]), Constant("int64", [1], ["a"])):
        with pytest.raises(ModelError):
            constants_of(graph_of(constants=(constant,)))
    with pytest.raises(ModelError):
        constants_of(graph_of(constants=(Constant("int64", [1 << 17], [0] * (1 << 17)),)))
