"""Requests that are like earlier ones are read by a kernel, and mean what the general way of reading says."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inference_requests import tensor

from torchfleet.api.serving.description import ServingDescription
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol, InferRequest
from torchfleet.apps.serve.endpoints.request_templates import MAX_TEMPLATES, RequestTemplates
from torchfleet.apps.serve.samples import Joiner, Packing, Samples
from torchfleet.base.errors import DataError
from torchfleet.data.features import Feature

FEATURES = [Feature("a", shape=[2]), Feature("x", "float32", [2]), Feature("b", shape=[])]
DESCRIBED = ServingDescription(FEATURES, "batch")


def protocol(pause: float = 0.0) -> InferenceProtocol:
    return InferenceProtocol(DESCRIBED, ["out"], 8, pause)


def body_of(ints: list[str], floats: list[str], blank: str = " ") -> bytes:
    """A request of one sample for every three integers; numbers are given as text."""
    num = len(ints) // 3
    inputs = [
        tensor("b", "INT64", [num], "B"),
        tensor("x", "FP32", [num, 2], "X"),
        tensor("a", "INT64", [num, 2], "A"),
    ]
    text = json.dumps({"inputs": inputs})
    for sign, numbers in (("B", ints[:num]), ("X", floats), ("A", ints[num:])):
        text = text.replace(f'"{sign}"', f"[{(',' + blank).join(numbers)}]")
    return text.encode()


def outcome(of: InferenceProtocol, body: bytes) -> Any:
    """What a body means: the bits of its blocks, or that it is refused."""
    try:
        samples = of.decode(body, None).samples
    except DataError:
        return "refused"
    assert samples.packed is not None
    return samples.num, {name: (block.dtype.name, block.tobytes()) for name, block in samples.packed.items()}


def learned(num: int = 1) -> InferenceProtocol:
    """Knows a request of `num` samples."""
    made = protocol()
    made.decode(body_of(["1"] * 3 * num, ["1.5"] * 2 * num), None)
    assert made._templates.read(body_of(["2"] * 3 * num, ["2.5"] * 2 * num)) is not None
    return made


ints = st.integers(-(1 << 64), 1 << 64).map(str) | st.sampled_from(
    ["0", "-0", "00", "01", "+1", "1.0", "1e2", "", "-", "9223372036854775807", "-9223372036854775808", "null", "[1]"]
)
floats = st.floats(allow_nan=False, allow_infinity=False).map(repr) | st.sampled_from(
    [
        "0.10000000149011612",
        "1e-45",
        "3.5e38",
        "-0.0",
        "1.",
        ".5",
        "1e",
        "1e+5",
        "1E-5",
        "5",
        "0x1",
        "NaN",
        "1e999",
        "123456789012345678901234567890",
        "0.000000000000000000000001",
        "16777217",
        "1e22",
        "1e23",
        "true",
        "-",
    ]
)


@given(
    st.lists(ints, min_size=6, max_size=6), st.lists(floats, min_size=4, max_size=4), st.sampled_from(["", " ", "  "])
)
def test_numbers_are_those_of_the_general_way(some: list[str], others: list[str], blank: str) -> None:
    body = body_of(some, others, blank)
    assert outcome(learned(2), body) == outcome(protocol(), body)


@given(st.integers(0, 10_000), st.integers(0, 255), st.sampled_from(["replace", "insert", "remove", "cut"]))
def test_spoiled_requests_mean_what_they_meant(place: int, byte: int, how: str) -> None:
    body = body_of(["1", "22", "-3"], ["1.5", "2e3"])
    at = place % len(body)
    rest = {"replace": 1, "insert": 0, "remove": 1, "cut": len(body)}[how]
    spoiled = body[:at] + (bytes([byte]) if how in ("replace", "insert") else b"") + body[at + rest :]
    try:
        general: Any = outcome(protocol(), spoiled)
    except AssertionError:  # it gives a feature in another type: not packed
        return
    assert outcome(learned(), spoiled) == general


def test_a_template_has_the_outputs_of_its_request() -> None:
    made = protocol()
    whole = json.loads(body_of(["1", "2", "3"], ["1.5", "2"]))
    plain = json.dumps(whole).encode()
    binary = json.dumps({**whole, "parameters": {"binary_data_output": True}}).encode()
    for _ in range(2):
        for body, is_binary in ((plain, False), (binary, True)):
            request: InferRequest = made.decode(body, None)
            assert request.outputs == [("out", is_binary)]
    named = json.dumps({**whole, "id": "7"}).encode()
    assert [made.decode(named, None).id for _ in range(2)] == ["7", "7"]


def test_templates_are_bounded_in_number_and_rate() -> None:
    made = protocol()
    for i in range(2 * MAX_TEMPLATES):
        made.decode(body_of(["1", "2", "3"], ["1", "2"]).replace(b": ", b":" + b" " * (i + 1)), None)
    assert len(made._templates._templates) == MAX_TEMPLATES
    slow = protocol(3600.0)
    for num in (1, 2):
        slow.decode(body_of(["1", "2", "3"] * num, ["1", "2"] * num), None)
    assert len(slow._templates._templates) == 1


@pytest.mark.parametrize("features", [[Feature("a", "float64", [1])], [Feature("a", shape=None, default=[])]])
def test_models_with_other_inputs_have_no_templates(features: list[Feature]) -> None:
    made = RequestTemplates(Packing(features), 0.0)
    made.learn(b"{}", [], 1, None)
    assert made.read(b"{}") is None


def test_blocks_of_a_request_are_its_own() -> None:
    made = learned()
    first: Samples = made.decode(body_of(["1", "2", "3"], ["1", "2"]), None).samples
    made.decode(body_of(["4", "5", "6"], ["3", "4"]), None)
    assert first.packed is not None
    np.testing.assert_array_equal(first.packed["int64"], [[2, 3, 1]])
    np.testing.assert_array_equal(first.packed["float32"], [[1, 2]])


@pytest.mark.parametrize(
    ("some", "others"),
    [
        (["9223372036854775807", "-1234567890123456789", "1000000000000000000"], ["1", "2"]),
        (["1", "2", "3"], ["0.0033333333333333335", "0.0010000000474974513"]),
    ],
)
def test_long_ids_and_small_fractions_are_read_by_the_kernel(some: list[str], others: list[str]) -> None:
    made, body = learned(), body_of(some, others)
    assert made._templates.read(body) is not None
    assert outcome(made, body) == outcome(protocol(), body)


def test_a_request_that_the_kernel_cannot_read_takes_one_place() -> None:
    made, body = protocol(), body_of(["1", "2", "3"], ["1.00000000000000000001", "2"])
    for _ in range(3):
        made.decode(body, None)
    assert len(made._templates._templates) == 1


def test_features_of_several_values_can_be_viewed_as_one_dimension() -> None:
    samples = learned(2).decode(body_of(["1", "2", "3", "4", "5", "6"], ["1", "2", "3", "4"]), None).samples
    joined = Joiner(FEATURES).joined([samples])
    assert joined.values["a"].view(-1).tolist() == [3, 4, 5, 6]
    assert joined.values["b"].tolist() == [1, 2]
