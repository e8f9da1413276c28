"""The list of operations that a saved network may have, against every operation of the installed torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchfleet.api.serving.allowed_operations import ALLOWED
from torchfleet.api.serving.graph_sizes import check_sizes
from torchfleet.api.serving.network_graph import (
    Constant,
    GraphInput,
    GraphOutput,
    NetworkGraph,
    Node,
    Step,
    steps_of,
)
from torchfleet.base.errors import ModelError
from torchfleet.data.features import Feature

RECORDED = Path(__file__).parent / "allowed_schemas.txt"  # as torch 2.13 prints them
WHOLE = {"dtype": "float32"}
WORDS_OF_REFUSED = (
    "backward",
    "empty",
    "as_strided",
    "grid_sampl",
    "unpool",
    "segment",
    "embedding_bag",
    "resize",
    "_from_file",
    "save",
)


def names() -> list[str]:
    return sorted(f"{packet}.{overload}" for packet, overloads in ALLOWED.items() for overload in overloads)


def schema_of(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)._schema


def arguments_of(schema: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema.arguments]


def test_the_schemas_are_those_that_were_judged() -> None:
    recorded = RECORDED.read_text().splitlines()
    if torch.__version__.startswith("2.13."):
        assert [str(schema_of(name)) for name in names()] == recorded
    for name, text in zip(names(), recorded, strict=True):  # other releases may lack an argument, and add none
        assert set(arguments_of(schema_of(name))) <= set(arguments_of(torch._C.parse_schema(text))), name


def test_every_other_operation_of_torch_is_refused() -> None:
    allowed, found = set(names()), set[str]()
    for schema in torch._C._jit_get_all_schemas():
        space, _, packet = schema.name.partition("::")
        name = f"{packet}.{schema.overload_name or 'default'}"
        if space == "aten" and name in allowed:
            found.add(name)
            assert not schema.is_mutable, name
            assert not any(word in name for word in WORDS_OF_REFUSED), name
            continue
        with pytest.raises(ModelError):
            Step(Node(f"{space}.{name}", []), 0)
    assert found == allowed
    assert len(allowed) < 500


TENSOR = {"value": 0}


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("zeros.default", [{"list": [2]}], {"layout": {"layout": "sparse_coo"}}),
        ("zeros.default", [{"list": [2]}], {"pin_memory": True}),
        ("zeros.default", [{"list": [2]}], {"dtype": {"dtype": "qint8"}}),
        ("zeros.default", [{"list": [2]}], {"device": {"device": "cuda"}}),
        ("zeros.default", [{"list": [2]}], {"out": TENSOR}),
        ("dropout.default", [TENSOR, 0.5, True], {}),
        ("batch_norm.default", [TENSOR, None, None, TENSOR, TENSOR, True, 0.1, 1e-5, False], {}),
        ("batch_norm.default", [TENSOR, None, None, TENSOR, TENSOR, 1, 0.1, 1e-5, False], {}),
        ("instance_norm.default", [TENSOR, None, None, TENSOR, TENSOR, True, 0.1, 1e-5, False], {}),
        ("searchsorted.Tensor", [TENSOR, TENSOR], {"sorter": TENSOR}),
        ("einsum.default", ["ab,bc->ac", {"list": [TENSOR, TENSOR]}], {"path": {"list": [0, 1]}}),
        ("one_hot.default", [TENSOR], {}),
        ("one_hot.default", [TENSOR, -1], {}),
        ("one_hot.default", [TENSOR, TENSOR], {}),
        ("scaled_dot_product_attention.default", [TENSOR, TENSOR, TENSOR, None, 0.5], {}),
        ("upsample_nearest1d.vec", [TENSOR, None, {"list": [1e-300]}], {}),
        ("upsample_bilinear2d.default", [TENSOR, {"list": [8, 8]}, False, 1e-300, None], {}),
        ("upsample_bilinear2d.default", [TENSOR, {"list": [8, 8]}, False, {"float": "nan"}, None], {}),
        ("conv1d.default", [TENSOR, TENSOR, None, {"list": [1]}, {"list": [-1]}], {}),
        ("max_pool2d.default", [TENSOR, {"list": [1 << 40, 1]}], {}),
        ("relu.default", [TENSOR, 1], {}),
    ],
)
def test_arguments_that_are_refused(op: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        Step(Node(f"aten.{op}", args, kwargs), 1)


MATRIX = torch.arange(12.0).view(4, 3)
OUTSIDE = [torch.full((4, 3), far) for far in (4, 1 << 20, 1 << 40, -5, -(1 << 40))]


@pytest.mark.parametrize("index", OUTSIDE, ids=lambda index: str(int(index[0, 0])))
def test_an_index_out_of_range_raises_an_error(index: torch.Tensor) -> None:
    """Held against all operations with indices that are on the list, in both layouts that have kernels of their own."""
    first = index[:, 0].contiguous()
    for many in (index, first[:, None].expand(4, 3)):
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("gather.default", (MATRIX, 0, many)),
            ("gather.default", (MATRIX, 1, many)),
            ("scatter.src", (MATRIX, 0, many, MATRIX)),
            ("scatter.value", (MATRIX, 1, many, 1.0)),
            ("scatter.value_reduce", (MATRIX, 0, many, 1.0, "multiply")),
            ("scatter.reduce", (MATRIX, 0, many, MATRIX, "add")),
            ("scatter_add.default", (MATRIX, 0, many, MATRIX)),
            *(
                ("scatter_reduce.two", (MATRIX, 0, many, MATRIX, how))
                for how in ("sum", "prod", "mean", "amax", "amin")
            ),
            ("embedding.default", (MATRIX, many)),
            ("index.Tensor", (MATRIX, [many])),
            ("index_put.default", (MATRIX, [many[:, 0]], MATRIX)),
            ("index_put.default", (MATRIX, [many[:, 0]], MATRIX, True)),
            ("index_select.default", (MATRIX, 0, many[:, 0])),
            ("index_select.default", (MATRIX.t(), 1, many[:, 0])),
            ("index_select.default", (MATRIX[:, 0], 0, many[:, 0])),
            ("index_add.default", (MATRIX, 0, many[:, 0], MATRIX)),
            ("index_add.default", (MATRIX[:, 0], 0, many[:, 0], MATRIX[:, 0])),
            ("index_copy.default", (MATRIX, 0, many[:, 0], MATRIX)),
            ("index_fill.int_Scalar", (MATRIX, 0, many[:, 0], 1.0)),
            ("index_fill.int_Tensor", (MATRIX, 0, many[:, 0], torch.tensor(1.0))),
            ("one_hot.default", (many, 4)),
        ]
        for name, args in calls:
            assert name in names()
            values: list[Any] = [*args, None]
            step = Step(_node_of(name, args), len(args))
            with pytest.raises((IndexError, RuntimeError)):
                step.run(values)
    with pytest.raises((IndexError, RuntimeError)):
        torch.ops.aten.take.default(MATRIX, index * 4)


def _node_of(name: str, args: tuple[Any, ...]) -> Node:
    """An operation on values; numbers and words are arguments, and the scatters take `reduce` by name."""
    made: list[Any] = []
    for i, arg in enumerate(args):
        is_list = isinstance(arg, list)
        made.append({"value": i} if isinstance(arg, (torch.Tensor, list)) and not is_list else arg)
        if is_list:
            made[-1] = {"value": i}
    kwargs = {"reduce": made.pop()} if name in ("scatter.reduce", "scatter.value_reduce") else {}
    return Node(f"aten.{name}", made, kwargs)


def run(op: str, *args: Any) -> Any:
    values: list[Any] = [*args, None]
    Step(Node(f"aten.{op}", [{"value": i} for i in range(len(args))]), len(args)).run(values)
    return values[-1]


HEADS = torch.randn(1, 2, 4, 8)


def test_sizes_that_torch_does_not_compare() -> None:
    long = torch.randn(1, 2, 64, 8)
    state, weights = torch.zeros(1, 3, 5), [torch.zeros(20, 4), torch.zeros(20, 5), torch.zeros(20), torch.zeros(20)]
    rest = (True, 1, 0.0, False, False, False)
    step = _recurrent_step(*rest)
    for args in ((HEADS, HEADS, long), (HEADS, long, HEADS)):
        with pytest.raises(ModelError):
            run("scaled_dot_product_attention.default", *args)
    for wrong in range(4):
        cut = [one[:3] if i == wrong else one for i, one in enumerate(weights)]
        with pytest.raises(ModelError):
            step.run([torch.zeros(7, 3, 4), [state, state], cut, None])
    for states in ([state, state[:, :1]], [state[:, :, :2], state], [state], [state.double(), state]):
        with pytest.raises(ModelError):
            step.run([torch.zeros(7, 3, 4), states, weights, None])
    with pytest.raises(ModelError):
        run("_weight_norm.default", torch.zeros(8, 3), torch.zeros(2, 1))
    statistics = torch.zeros(2), torch.ones(2)
    inner = Step(
        Node(
            "aten._native_batch_norm_legit_no_training.default", [{"value": 0}, None, None, *_values(1, 2), 0.1, 1e-5]
        ),
        3,
    )
    with pytest.raises((ModelError, RuntimeError)):
        inner.run([torch.zeros(2, 8, 3), *statistics, None])


def _values(*numbers: int) -> list[Any]:
    return [{"value": number} for number in numbers]


def _recurrent_step(*rest: Any) -> Step:
    return Step(Node("aten.lstm.input", [*_values(0, 1, 2), *rest]), 3)


def graph_of(*nodes: Node, constants: tuple[Constant, ...] = ()) -> NetworkGraph:
    outputs = [GraphOutput("out", len(constants) + len(nodes), "float32", [])]
    return NetworkGraph([GraphInput("x")], [], list(constants), list(nodes), outputs)


def full(size: list[Any]) -> Node:
    return Node("aten.full.default", [{"list": size}, 0], {"dtype": WHOLE})


@pytest.mark.parametrize(
    "nodes",
    [
        [full([1 << 40])],
        [full([1 << 62, 1 << 62])],
        [full([1 << 27])] * 3,  # each is small enough
        [Node("operator.pow", [2, 40]), full([{"value": 1}])],
        [Node("aten.repeat.default", [TENSOR, {"list": [1 << 31]}])],
        [
            Node("aten.unsqueeze.default", [TENSOR, 1]),
            Node("aten.expand.default", [{"value": 1}, {"list": [-1, 1 << 40]}]),
            Node("aten.clone.default", [{"value": 2}]),
        ],
        [Node("aten.one_hot.default", [TENSOR, 1 << 40])],
        [Node("aten.arange.default", [1 << 40])],
        [Node("aten.eye.default", [1 << 20])],
        [Node("aten.constant_pad_nd.default", [TENSOR, {"list": [0, 1 << 40]}])],
        # numbers of samples that are multiplied with each other again and again
        [
            Node("aten.outer.default", _values(0, 0)),
            Node("aten.flatten.using_ints", _values(1)),
            Node("aten.outer.default", _values(2, 2)),
        ],
    ],
)
def test_memory_is_bounded(nodes: list[Node]) -> None:
    features = [Feature("x", "int64" if "one_hot" in nodes[-1].op else "float32", [])]
    with pytest.raises(ModelError):
        check_sizes(graph_of(*nodes), features, {})


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("pow", [10, 1 << 30]),
        ("mul", [{"list": [0]}, 1 << 40]),
        ("mul", ["a", 1 << 40]),
        ("mul", [1 << 62, 1 << 62]),
        ("getitem", [TENSOR, 0]),
        ("add", [TENSOR, 1]),
    ],
)
def test_arithmetic_is_on_sizes_alone(name: str, args: list[Any]) -> None:
    steps = steps_of(graph_of(Node(f"operator.{name}", args)))
    with pytest.raises(ModelError):
        steps[0].run([torch.zeros(3), None])


def test_shapes_that_do_not_fit_are_found_before_anything_is_computed() -> None:
    graph = graph_of(Node("aten.mm.default", _values(0, 0)))
    with pytest.raises(ModelError):
        check_sizes(graph, [Feature("x", "float32", [3])], {})
    check_sizes(graph_of(Node("aten.relu.default", [TENSOR])), [Feature("x", "float32", [3])], {})
    with pytest.raises(ModelError):
        check_sizes(graph_of(Node("aten.relu.default", [TENSOR])), [Feature("y", "float32", [3])], {})
