"""Requests of the Open Inference Protocol: what they mean, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.inference_requests import IDS, WRONG, tensor

import torchfleet as fleet
from torchfleet.api.serving.description import ServingDescription
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol
from torchfleet.apps.serve.samples import Joiner
from torchfleet.base.errors import DataError
from torchfleet.data.features import Feature, SampleText, SlotField

FEATURES = [
    Feature("ids", shape=[2], hash_seed=3, hash_size=1000),
    Feature("x", "float32", [1], default=[0.5]),
    Feature("tags", shape=None, default=[]),
]
DESCRIBED = ServingDescription(FEATURES, "batch")


def protocol(described: ServingDescription = DESCRIBED, max_batch: int = 4) -> InferenceProtocol:
    return InferenceProtocol(described, ["out", "more"], max_batch)


def decoded(*inputs: dict[str, Any], **more: Any) -> Any:
    return protocol().decode(json.dumps({"inputs": inputs, **more}).encode(), None)


def joined(*inputs: dict[str, Any], **more: Any) -> Any:
    return Joiner(FEATURES).joined([decoded(*inputs, **more).samples])


def test_flat_and_nested_data_are_the_same() -> None:
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]]):
        batch = joined(tensor("ids", "INT64", [2, 2], data))
        assert batch.values["ids"].tolist() == [[1, 2], [3, 4]]


def test_missing_features_have_their_defaults() -> None:
    batch = joined(IDS)
    assert batch.values["x"].tolist() == [[0.5], [0.5]]
    assert batch.offsets["tags"].tolist() == [0, 0]
    assert len(batch.values["tags"]) == 0


def test_strings_are_hashed() -> None:
    batch = joined(tensor("ids", "BYTES", [1, 2], ["a", "größe"]))
    assert batch.values["ids"].tolist() == [[fleet.hash_string(text, 3) % 1000 for text in ("a", "größe")]]


def test_ragged_values_come_with_offsets_or_in_rows() -> None:
    offsets = tensor("tags.offsets", "INT64", [2], [0, 2])
    batch = joined(IDS, tensor("tags", "INT64", [3], [7, 8, 9]), offsets)
    assert batch.values["tags"].tolist() == [7, 8, 9]
    assert batch.offsets["tags"].tolist() == [0, 2]
    batch = joined(IDS, tensor("tags", "INT64", [2, 2], [7, 8, 9, 10]))
    assert batch.offsets["tags"].tolist() == [0, 2]


def test_requests_are_joined_in_their_order() -> None:
    one, two = decoded(IDS).samples, decoded(tensor("ids", "INT32", [1, 2], [9, 9]), tensor("x", "FP64", [1, 1], [2]))
    batch = Joiner(FEATURES).joined([two.samples, one])
    assert batch.values["ids"].tolist() == [[9, 9], [1, 2], [3, 4]]
    assert batch.values["x"].tolist() == [[2.0], [0.5], [0.5]]


def test_packed_requests_are_joined_with_others() -> None:
    features = [Feature("a", shape=[2]), Feature("x", "float32", [1]), Feature("b", shape=[])]
    described, joiner = ServingDescription(features, "batch"), Joiner(features)

    def request(num: int, kind: str) -> Any:
        start = 10 * num
        inputs = [
            tensor("b", kind, [num], list(range(start, start + num))),
            tensor("a", "INT64", [num, 2], list(range(100 + start, 100 + start + 2 * num))),
            tensor("x", "FP32", [num, 1], [0.5 + start] * num),
        ]
        return protocol(described).decode(json.dumps({"inputs": inputs}).encode(), None).samples

    packed, other = [request(num, "INT64") for num in (2, 2, 3)], [request(num, "INT32") for num in (2, 2, 3)]
    assert all(samples.packed is not None for samples in packed)
    assert all(samples.packed is None for samples in other)
    for chosen in ([0, 1], [0, 1, 2]):
        expected = joiner.joined([other[i] for i in chosen])
        for some in ([packed[i] for i in chosen], [packed[chosen[0]], *(other[i] for i in chosen[1:])]):
            found = joiner.joined(some)
            assert found.num == expected.num
            for name, values in expected.values.items():
                assert found.values[name].dtype == values.dtype
                assert found.values[name].tolist() == values.tolist()


def test_binary_tensors_follow_the_json() -> None:
    ids, strings = np.array([[5, -6]], np.int64), b"\x01\x00\x00\x00a\x00\x00\x00\x00"
    inputs = [
        tensor("ids", "BYTES", [1, 2], None, binary_data_size=len(strings)),
        tensor("tags", "UINT64", [1, 2], None, binary_data_size=16),
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}, "id": "7"}).encode()
    request = protocol().decode(head + strings + ids.tobytes(), len(head))
    batch = Joiner(FEATURES).joined([request.samples])
    assert batch.values["ids"].tolist() == [[fleet.hash_string(text, 3) % 1000 for text in ("a", "")]]
    assert batch.values["tags"].tolist() == [5, -6]
    results = {"out": np.array([1.5], np.float32), "more": np.array([[1], [2]], np.int64)}
    body, size = protocol().encode(request, results, "m", "3")
    assert size is not None
    made = json.loads(body[:size])
    assert (made["id"], made["model_name"], made["model_version"]) == ("7", "m", "3")
    assert [output["parameters"]["binary_data_size"] for output in made["outputs"]] == [4, 16]
    assert body[size:] == results["out"].tobytes() + results["more"].tobytes()


def test_only_outputs_that_are_asked_for_are_returned() -> None:
    request = decoded(IDS, outputs=[{"name": "more", "parameters": {"binary_data": False}}])
    body, size = protocol().encode(request, {"more": np.ones((2, 1), np.float32)}, "m", "1")
    assert size is None
    (output,) = json.loads(body)["outputs"]
    assert output == {"name": "more", "datatype": "FP32", "shape": [2, 1], "data": [1.0, 1.0]}


def test_lines_of_text_are_samples() -> None:
    text = SampleText("slots", [SlotField("ids", dim=2), SlotField("x", "float32", 1), SlotField("tags")])
    body = {"inputs": [tensor("text", "BYTES", [2], ["2 1 2 1 0.5 0", "2 3 4 1 1.5 2 8 9"])]}
    request = protocol(ServingDescription(FEATURES, "batch", text=text)).decode(json.dumps(body).encode(), None)
    batch = Joiner(FEATURES).joined([request.samples])
    assert batch.values["ids"].tolist() == [[1, 2], [3, 4]]
    assert batch.values["x"].tolist() == [[0.5], [1.5]]
    assert batch.offsets["tags"].tolist() == [0, 0]
    body["inputs"].append(IDS)
    with pytest.raises(DataError):
        protocol(ServingDescription(FEATURES, "batch", text=text)).decode(json.dumps(body).encode(), None)


def test_wrong_requests_are_refused_each() -> None:
    assert len(WRONG) >= 200
    for body in WRONG:
        with pytest.raises(DataError):
            protocol().decode(body, None)


@pytest.mark.parametrize("size", [-1, 5, 1 << 40])
def test_a_wrong_size_of_the_json_is_refused(size: int) -> None:
    with pytest.raises(DataError):
        protocol().decode(json.dumps({"inputs": [IDS]}).encode(), size)


def test_bytes_behind_the_last_binary_tensor_are_refused() -> None:
    head = json.dumps({"inputs": [tensor("ids", "INT64", [1, 2], None, binary_data_size=16)]}).encode()
    assert protocol().decode(head + bytes(16), len(head)).samples.num == 1
    for rest in (bytes(15), bytes(17), b""):
        with pytest.raises(DataError):
            protocol().decode(head + rest, len(head))


def test_damaged_binary_strings_are_refused() -> None:
    for data in (b"\x01", b"\x05\x00\x00\x00a", b"\xff\xff\xff\xff", b"\x00" * 4, b"\x00" * 12):
        head = json.dumps({"inputs": [tensor("ids", "BYTES", [1, 2], None, binary_data_size=len(data))]}).encode()
        with pytest.raises(DataError):
            protocol().decode(head + data, len(head))


def test_numbers_that_are_not_finite_are_refused() -> None:
    for value in (np.nan, np.inf):
        head = json.dumps({"inputs": [IDS, tensor("x", "FP32", [2, 1], None, binary_data_size=8)]}).encode()
        with pytest.raises(DataError):
            protocol().decode(head + np.array([value, 1], np.float32).tobytes(), len(head))
