"""One input of a request: its data, as JSON or bytes, as the values of a feature."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from torchfleet.apps.serve.tensors import DATATYPES, datatype_of, from_bytes, from_json, strings_from_bytes
from torchfleet.base.errors import DataError
from torchfleet.data.features import Feature, FormerFeature


class InputParameters(msgspec.Struct, frozen=True):
    """The parameters of an input that are known here. Others are skipped, and take no memory."""

    binary_data_size: int | None = None


class RequestInput(msgspec.Struct):
    """An input, with the fields of the Open Inference Protocol."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: InputParameters = InputParameters()


def data_of(one: RequestInput, rest: memoryview) -> tuple[Any, memoryview]:
    """(the values of an input, the bytes of `rest` behind its own). Values of JSON with nulls are an array of objects.
    Raises DataError.
    """
    if one.datatype != "BYTES" and one.datatype not in DATATYPES:
        raise DataError(f"input '{one.name:.80}': expected one of {', '.join(DATATYPES)}, BYTES as datatype")
    size = one.parameters.binary_data_size
    if size is None:
        if not bytes(one.data):
            raise DataError(f"input '{one.name:.80}': expected data, or parameters with binary_data_size")
        return from_json(one.data, one.datatype, one.shape, one.name), rest
    if not 0 <= size <= len(rest) or bytes(one.data):
        raise DataError(f"input '{one.name:.80}': {size!r:.40} bytes of binary data, and {len(rest)} are left")
    own, rest = rest[:size], rest[size:]
    if one.datatype == "BYTES":
        return strings_from_bytes(own, one.shape, one.name), rest
    return from_bytes(own, one.datatype, one.shape, one.name), rest


def as_feature(feature: Feature, one: RequestInput, data: Any) -> Any:
    """Values that fit the feature's type: strings are hashed or found in the vocabulary, numbers are put into the
    feature's buckets, and missing ones are filled, as FeatureFile.tensors does it. Raises DataError.
    """
    if isinstance(feature, FormerFeature):
        return _as_formerly(feature, one, data)
    is_plain = feature.is_plain and not feature.hash_size
    if is_plain and type(data) is list and one.datatype == datatype_of(feature.dtype):
        return data  # many lists become one array later, which is faster
    is_missing = None
    if isinstance(data, np.ndarray) and data.dtype.kind == "O":  # JSON with nulls
        is_missing = np.array([value is None for value in data])
        filler: Any = "" if one.datatype == "BYTES" else 0
        data = [filler if value is None else value for value in data]
    if one.datatype == "BYTES":
        return feature.from_strings([utf8(string) for string in data], is_missing)
    with np.errstate(over="ignore"):  # numbers above the range of their type become infinite, and are refused as such
        numbers = data if isinstance(data, np.ndarray) else np.array(data, DATATYPES[one.datatype])
    return feature.from_numbers(numbers, is_missing)


def _as_formerly(feature: FormerFeature, one: RequestInput, data: Any) -> Any:
    """As as_feature, by the rule of version 1 of serving.json."""
    if isinstance(data, np.ndarray) and data.dtype.kind == "O":
        raise DataError(f"input '{one.name}': expected {one.datatype} in each place, found a null")
    if one.datatype == "BYTES":
        if feature.dtype != "int64":
            raise DataError(f"input '{one.name}': expected numbers ({feature.dtype}), found strings")
        return feature.hashed([utf8(string) for string in data])
    kind, wanted = DATATYPES[one.datatype].kind, np.dtype(feature.dtype).kind
    if feature.buckets and kind == "f":
        return feature.bucketed(data)
    if kind != wanted and (kind, wanted) != ("u", "i"):
        raise DataError(f"input '{one.name}': expected {datatype_of(feature.dtype)}, found {one.datatype}")
    if one.datatype == "UINT64" and isinstance(data, np.ndarray):
        return data.view(np.int64)  # ids from 2^63 on are kept as the same 64 bits, as in training
    narrow = DATATYPES[one.datatype].itemsize > np.dtype(feature.dtype).itemsize and wanted == "i"
    if narrow and len(data) and not _fits(data, feature.dtype):
        raise DataError(f"input '{one.name}': expected numbers that fit {feature.dtype}")
    return data


def _fits(data: Any, dtype: str) -> bool:
    info = np.iinfo(dtype)
    array = np.asarray(data)
    return bool(array.min() >= info.min and array.max() <= info.max)


def utf8(string: str | bytes) -> bytes:
    return string.encode() if isinstance(string, str) else string
