"""Tensors of the Open Inference Protocol in messages of gRPC: from and to the bytes of its binary form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.apps.serve.endpoints.inference_protocol import InferBody, OutputParameters, RequestOutput
from torchfleet.apps.serve.endpoints.request_inputs import InputParameters, RequestInput
from torchfleet.apps.serve.tensors import DATATYPES, MAX_RANK, datatype_of, num_elements
from torchfleet.base.errors import DataError

# The field of InferTensorContents for each type. The protocol has no field for FP16, which comes as bytes.
FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def check_fields(data: bytes, most: int) -> None:
    """Raise DataError for a message with more fields than this: each would take memory when it is decoded."""
    at, num = 0, 0
    while at < len(data) and num <= most:
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            _, at = _varint(data, at)
        elif tag & 7 == 2:
            size, at = _varint(data, at)
            at += size
        else:
            at += {1: 8, 5: 4}.get(tag & 7, len(data))
        num += 1
    if num > most:
        raise DataError(f"expected at most {most:,} fields in a message, found more")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number that begins at this byte, the place behind it)."""
    value = shift = 0
    while at < len(data):
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            break
    return value, at


def body_of(message: Any) -> tuple[InferBody, memoryview]:
    """A ModelInferRequest as the request that JSON would give, and the bytes of its tensors. Raises DataError."""
    raw = list(message.raw_input_contents)
    if raw and len(raw) != len(message.inputs):
        raise DataError(f"expected raw_input_contents for {len(message.inputs)} inputs, found {len(raw)}")
    parts, inputs = [], []
    for i, one in enumerate(message.inputs):
        if raw and one.HasField("contents"):
            raise DataError(f"input '{one.name:.80}': expected contents or raw_input_contents, found both")
        parts.append(raw[i] if raw else _as_bytes(one))
        size = InputParameters(len(parts[-1]))
        inputs.append(RequestInput(one.name, list(one.shape[: MAX_RANK + 1]), one.datatype, parameters=size))
    outputs = [
        RequestOutput(one.name, OutputParameters(classification=0 if "classification" in one.parameters else None))
        for one in message.outputs
    ]
    return InferBody(inputs, message.id, outputs), memoryview(b"".join(parts))


def _as_bytes(one: Any) -> bytes:
    """The typed contents of an input, as bytes of the binary form."""
    if one.datatype not in FIELDS:
        raise DataError(
            f"input '{one.name:.80}': expected one of {', '.join(FIELDS)} as datatype, found '{one.datatype:.40}'"
        )
    wanted = FIELDS[one.datatype]
    for field, _ in one.contents.ListFields():
        if field.name != wanted:
            raise DataError(f"input '{one.name:.80}': expected {wanted} for {one.datatype}, found {field.name}")
    values = getattr(one.contents, wanted)
    if len(values) != num_elements(list(one.shape[: MAX_RANK + 1]), one.name):
        raise DataError(f"input '{one.name:.80}': {len(values)} values, and shape {list(one.shape)!r:.80}")
    if one.datatype == "BYTES":
        return b"".join(len(string).to_bytes(4, "little") + string for string in values)
    try:
        return np.array(list(values), DATATYPES[one.datatype]).tobytes()
    except OverflowError:
        raise DataError(f"input '{one.name:.80}': expected numbers that fit {one.datatype}") from None


def fill(response: Any, outputs: list[tuple[str, bool]], results: Mapping[str, npt.NDArray[Any]], is_raw: bool) -> None:
    """Add results to a ModelInferResponse: as bytes if the request's tensors were bytes, else as typed contents."""
    datatypes = {name: datatype_of(results[name].dtype.name) for name, _ in outputs}
    is_raw = is_raw or not FIELDS.keys() >= set(datatypes.values())
    for name, datatype in datatypes.items():
        array = results[name]
        added = response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if is_raw:
            response.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
        else:
            getattr(added.contents, FIELDS[datatype]).extend(array.reshape(-1).tolist())


def without_parameters(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a model for ModelMetadataResponse. Its inputs have no field for parameters, so these become
    properties of the model: the JSON of each input's, as "NAME.parameters".
    """
    inputs = [{name: value for name, value in one.items() if name != "parameters"} for one in metadata["inputs"]]
    properties = {
        f"{one['name']}.parameters": msgspec.json.encode(one["parameters"]).decode()
        for one in metadata["inputs"]
        if "parameters" in one
    }
    return {**metadata, "inputs": inputs, **({"properties": properties} if properties else {})}
