"""Requests of the Open Inference Protocol for a model that takes `ids` of shape (samples, 2), `x` of (samples, 1)."""

from __future__ import annotations

import json
from typing import Any


def tensor(name: str, datatype: str, shape: list[Any], data: Any, **parameters: Any) -> dict[str, Any]:
    made = {"name": name, "datatype": datatype, "shape": shape}
    return {**made, **({} if data is None else {"data": data}), **({"parameters": parameters} if parameters else {})}


IDS = tensor("ids", "INT64", [2, 2], [1, 2, 3, 4])


def wrong_requests() -> list[bytes]:
    """Two hundred requests, each wrong in its own way."""
    inputs: list[list[Any]] = [[]]
    shapes: tuple[Any, ...] = (
        [],
        [2],
        [4],
        [1, 4],
        [2, 2, 1],
        [-1, 2],
        [2, -2],
        [1 << 31, 2],
        [0, 2],
        [1] * 9,
        [5, 2],
        [2, 3],
    )
    inputs += [[tensor("ids", "INT64", shape, [1, 2, 3, 4])] for shape in shapes]
    inputs += [
        [{**IDS, "shape": shape}] for shape in ("2,2", None, [2.5, 2], ["2", 2], {"0": 2}, [[2], [2]], [1 << 70])
    ]
    datas: tuple[Any, ...] = (
        [],
        [1],
        [1] * 5,
        "1234",
        7,
        None,
        {},
        [1, 2, 3, "4"],
        [1, 2, 3, None],
        [1.5, 2, 3, 4],
        [[1, 2], [3]],
    )
    datas += ([[1, 2, 3, 4]], [[[1, 2], [3, 4]]], [True, 1, 2, 3], [1 << 63, 1, 2, 3], [1, 2, 3, [4]], [[], []])
    inputs += [[{**IDS, "data": data}] for data in datas]
    for datatype in ("INT", "int64", "FP32", "FP64", "BOOL", "STRING", "", "BF16", "INT128", "UINT65", "JSON"):
        inputs.append([{**IDS, "datatype": datatype}])
    inputs += [[{**IDS, "datatype": datatype}] for datatype in (None, 5, [], {"a": 1})]
    for datatype, most in (("INT8", 128), ("UINT8", 256), ("INT16", 1 << 15), ("INT32", 1 << 31), ("UINT32", 1 << 32)):
        inputs += [[tensor("ids", datatype, [1, 2], [0, most])], [tensor("ids", datatype, [1, 2], [0, -most - 1])]]
    inputs += [[IDS, IDS], [IDS, tensor("other", "INT64", [2, 1], [1, 2])], [{}], [None], [7], ["ids"], [[IDS]]]
    inputs += [[IDS, tensor("x", "FP32", shape, [1.0, 2.0])] for shape in ([2], [1, 2], [2, 1, 1], [1, 1], [3, 1])]
    inputs += [[IDS, tensor("x", "BOOL", [2, 1], [True, False])], [IDS, tensor("x", "FP32", [2, 1], [1, None])]]
    inputs.append([tensor("ids", "BYTES", [1, 2], ["a", None])])
    inputs += [[IDS, tensor("x", "BYTES", [2, 1], ["1", "2"])], [IDS, tensor("x", "FP32", [2, 1], ["1", "2"])]]
    inputs += [
        [tensor("x", "FP32", [1, 1], [1.0])],
        [{**IDS, "name": ""}],
        [{**IDS, "name": 5}],
        [{**IDS, "name": None}],
    ]
    for starts in ([1, 2], [0, 5], [0], [2, 1], [-1, 0], [], [0, 1, 2]):
        offsets = tensor("tags.offsets", "INT64", [len(starts)], starts)
        inputs.append([IDS, tensor("tags", "INT64", [3], [7, 8, 9]), offsets])
    inputs += [[IDS, tensor("tags", "INT64", [3], [7, 8, 9])], [IDS, tensor("tags.offsets", "INT64", [2], [0, 1])]]
    inputs += [[IDS, tensor("ids.offsets", "INT64", [2], [0, 1])], [IDS, tensor("tags", "INT64", [1, 3], [7, 8, 9])]]
    sizes: tuple[Any, ...] = (-1, 5, 8, 31, 33, 1 << 40, "32", None, 1.5, True, [], {})
    inputs += [[tensor("ids", "INT64", [2, 2], None, binary_data_size=size)] for size in sizes]
    inputs += [
        [tensor("ids", "INT64", [2, 2], [1, 2, 3, 4], binary_data_size=0)],
        [tensor("ids", "INT64", [2, 2], None)],
    ]
    bodies = [json.dumps({"inputs": some}).encode() for some in inputs]
    more: tuple[Any, ...] = (
        {"outputs": [{"name": "none"}]},
        {"outputs": [{"name": "out"}, {"name": "out"}]},
        {"outputs": [{"name": "out", "parameters": {"classification": 3}}]},
        {"outputs": [{"name": "out", "parameters": {"binary_data": "yes"}}]},
        {"outputs": [{}]},
        {"outputs": "out"},
        {"outputs": [7]},
        {"parameters": {"binary_data_output": 1}},
        {"parameters": []},
        {"parameters": "a"},
        {"id": 7},
        {"id": []},
    )
    bodies += [json.dumps({"inputs": [IDS], **some}).encode() for some in more]
    whole = json.dumps({"inputs": [IDS]}).encode()
    bodies += [whole[:cut] for cut in range(len(whole))]
    bodies += [
        whole + b"}",
        whole + whole,
        b"\xff" + whole,
        whole.replace(b"ids", b"\xff\xfe"),
        b"null",
        b"[]",
        b'""',
        b"1",
    ]
    bodies += [
        b"[" * 50_000,
        b'{"inputs":' * 5_000,
        b'{"inputs":[' + b"[" * 20_000,
        b"\x00" * 1000,
        b"NaN",
        b'{"inputs":NaN}',
    ]
    bodies += [
        whole.replace(b"[1, 2, 3, 4]", data) for data in (b"[1,2,3,NaN]", b"[1,2,3,1e999]", b"[1,2,3,0x4]", b"[1,2,3,]")
    ]
    return bodies


WRONG = wrong_requests()
