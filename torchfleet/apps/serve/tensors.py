"""Tensors of the Open Inference Protocol: their types, and their data as JSON or as bytes."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.base.prepared_types import prepared

MAX_RANK = 8
_HEAD = 4096  # bytes of a tensor's JSON that show whether it is nested

# numpy's type by the protocol's name. BYTES, strings of any length, are not listed.
DATATYPES: dict[str, np.dtype[Any]] = {
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype.name: name for name, dtype in DATATYPES.items()}
_INT64 = (-(1 << 63), (1 << 63) - 1)


def datatype_of(dtype: str) -> str:
    """The protocol's name of a type of torch or numpy."""
    if dtype not in _NAMES:
        raise DataError(f"the Open Inference Protocol has no type for {dtype}")
    return _NAMES[dtype]


def num_elements(shape: list[int], name: str) -> int:
    """Raises DataError unless this is the shape of a tensor."""
    if len(shape) > MAX_RANK or any(size < 0 or size >= 1 << 31 for size in shape):
        raise DataError(f"input '{name}': expected a shape of at most {MAX_RANK} sizes from 0 on, found {shape!r:.80}")
    return math.prod(shape)


def from_json(raw: msgspec.Raw, datatype: str, shape: list[int], name: str) -> Any:
    """The values of a tensor as a flat list in row-major order, or as an array of objects if there are nulls among
    them; `raw` is flat or nested. Raises DataError for values of another type or number.
    """
    num, data, error = num_elements(shape, name), None, ""
    if datatype != "BYTES" and not may_have(raw, num):
        raise DataError(f"input '{name}': expected {num} values for shape {shape}, found another number of them")
    view = memoryview(raw)
    is_nested = bytes(view[:_HEAD]).lstrip()[1:].lstrip().startswith(b"[")
    rank = max(1, len(shape)) if is_nested else 1
    for has_nulls in (False, True) if b"null" in bytes(view) else (False,):
        try:
            data = _decoder(datatype, rank, has_nulls).decode(raw)
            break
        except (msgspec.MsgspecError, RecursionError) as failure:
            error = error or str(failure)
    if data is None:
        form = f", flat or as {shape}" if is_nested else ""
        raise DataError(f"input '{name}': expected data of type {datatype}{form}: {error}") from None
    flat = _flat(data, shape, name) if is_nested else data
    if len(flat) != num:
        raise DataError(f"input '{name}': expected {num} values for shape {shape}, found {len(flat)}")
    if not has_nulls:
        return flat
    values = np.empty(num, object)
    values[:] = flat
    return values


def may_have(raw: msgspec.Raw, num: int) -> bool:
    """Whether a JSON array of numbers can have `num` values. A text with too many is not decoded: each would take
    memory first.
    """
    view = memoryview(raw)
    return len(view) <= _HEAD or bytes(view).count(b",") + 1 == max(num, 1)


def _flat(data: Any, shape: list[int], name: str) -> list[Any]:
    num = shape[0]
    for size in shape[1:]:
        if len(data) != num or any(len(part) != size for part in data):
            raise DataError(f"input '{name}': expected data of shape {shape}, found lists of other lengths")
        data, num = [value for part in data for value in part], num * size
    return data  # type: ignore[no-any-return]


def flat_decoder(datatype: str) -> msgspec.json.Decoder[Any]:
    """Decodes a flat list of values of this type."""
    return _decoder(datatype, 1)


@functools.cache
def _decoder(datatype: str, rank: int, has_nulls: bool = False) -> msgspec.json.Decoder[Any]:
    kind: Any = str
    if datatype != "BYTES":
        dtype = DATATYPES[datatype]
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            kind = Annotated[int, msgspec.Meta(ge=max(int(info.min), _INT64[0]), le=min(int(info.max), _INT64[1]))]
        else:
            kind = bool if dtype.kind == "b" else float
    if has_nulls:
        kind = kind | None
    for _ in range(rank):
        kind = list[kind]
    return msgspec.json.Decoder(prepared(kind))


def from_bytes(data: memoryview, datatype: str, shape: list[int], name: str) -> npt.NDArray[Any]:
    """The values of a binary tensor, flat. It may view `data`."""
    num, dtype = num_elements(shape, name), DATATYPES[datatype]
    if len(data) != num * dtype.itemsize:
        raise DataError(
            f"input '{name}': expected {num * dtype.itemsize} bytes for {datatype} of shape {shape}, found {len(data)}"
        )
    return np.frombuffer(data, dtype)


def strings_from_bytes(data: memoryview, shape: list[int], name: str) -> list[bytes]:
    """The strings of a binary tensor: each is its length in four bytes, and its bytes."""
    found: list[bytes] = []
    num, at = num_elements(shape, name), 0
    while at < len(data) and len(found) <= num:
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data) or at + 4 > len(data):
            raise DataError(f"input '{name}': string {len(found)} ends behind the tensor's {len(data)} bytes")
        found.append(bytes(data[at + 4 : end]))
        at = end
    if len(found) != num:
        more = " or more" if len(found) > num else ""
        raise DataError(f"input '{name}': expected {num} strings for shape {shape}, found {len(found)}{more}")
    return found
