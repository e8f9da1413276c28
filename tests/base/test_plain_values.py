"""Plain values come back as they were; what is not plain is refused, and so are bytes that were not packed by it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.cases import each_of
from support.messages import naming

from torchfleet.base.errors import FleetError
from torchfleet.base.plain_values import pack, unpack


@each_of(
    "value",
    [
        None, True, -3, 2**64 - 1, 0.1, float("inf"), "text", b"\0bytes", [], [1, [2, "x"]], (), (1, (2.5, None)),
        {}, {"a": [1], 3: (4,), (5, 6): {"deep": True}},
    ],
    ids=repr,
)  # fmt: skip
def test_what_python_has_comes_back_with_its_types(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value
    assert repr(found) == repr(value)


@each_of("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@each_of("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_come_back_with_type_shape_and_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6).to(dtype)[: max(1, int(np.prod(shape)))].resize_(shape)
    found = unpack(pack([tensor, tensor.t() if len(shape) == 2 else tensor]))
    assert found[0].dtype == dtype
    assert torch.equal(found[0], tensor)
    assert found[1].shape == (tensor.t() if len(shape) == 2 else tensor).shape
    found[0] += 1 if dtype != torch.bool else True  # its own memory, which can be written to


def test_arrays_and_states_of_models_come_back() -> None:
    model = torch.nn.BatchNorm1d(3)
    found = unpack(pack({"state": model.state_dict(), "array": np.arange(4, dtype=np.int16), "one": np.float32(2.5)}))
    assert all(torch.equal(found["state"][name], value) for name, value in model.state_dict().items())
    np.testing.assert_array_equal(found["array"], np.arange(4, dtype=np.int16))
    assert found["array"].dtype == np.int16
    assert type(found["one"]) is np.float32
    assert unpack(pack(OrderedDict(a=1))) == {"a": 1}


@each_of(
    ("value", "text"),
    [
        ([{"model": torch.nn.Linear(1, 1)}], "result[0]['model'] Linear state_dict"),
        (print, "result builtins.builtin_function_or_method"),
        ({"n": 2**70}, "result"),
        (np.array([object()]), "object"),
        (torch.eye(2).to_sparse(), "dense"),
        ({object(): 1}, "result builtins.object"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value: Any, text: str) -> None:
    with pytest.raises(FleetError, match=naming(*text.split())):
        pack(value, "result")


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(FleetError, match="result"):
        pack(endless, "result")


@each_of(
    ("kind", "dtype", "shape"),
    [
        (1, "_dynamo", [1]), (1, "float32", [2**64 - 1]), (1, "float32", [2**63, 0]),
        (1, "Tensor", [1]), (1, "quint8", [4]),
        (2, "1" * 5000 + "i4", [1]), (2, "O", [1]), (2, "i4,i4", [1]), (2, "<f4", [2**64 - 1]), (2, "<f4", [-7]),
    ],
)  # fmt: skip
def test_a_made_up_type_or_shape_is_refused_and_imports_nothing(kind: int, dtype: str, shape: list[int]) -> None:
    before = len(sys.modules)
    made = msgspec.msgpack.Ext(kind, msgspec.msgpack.encode([dtype, shape, bytes(4)]))
    with pytest.raises(FleetError, match="value"):
        unpack(msgspec.msgpack.encode(made))
    assert len(sys.modules) == before


def test_bytes_that_nobody_packed_are_refused() -> None:
    good = pack({"tensor": torch.ones(3), "list": [1, 2]})
    assert unpack(good)["list"] == [1, 2]
    refused = 0
    for place in range(len(good)):
        for changed in (good[:place], good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :]):
            try:
                unpack(changed)
            except FleetError:
                refused += 1
    assert refused > len(good), "cut ones, and most of the changed ones"
