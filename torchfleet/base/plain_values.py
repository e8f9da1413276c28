"""Serializes plain values: numbers, strings, lists, dictionaries, tensors and arrays. Never executes code.

Workers exchange values in this form with each other and with a notebook. Other types raise an error that says where in
the value they are.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from torchfleet.base.errors import FleetError
from torchfleet.base.prepared_types import prepared

_TENSOR, _ARRAY, _TUPLE, _PAIRS = 1, 2, 3, 4  # extension types of msgpack
_KNOWN = "None, numbers, strings, bytes, lists, tuples, dictionaries, tensors and numpy arrays"
_PLAIN_ARRAYS = "biufc"  # kinds of numpy dtypes that their bytes describe completely
_ARRAY_TYPE = re.compile(f"[<>|][{_PLAIN_ARRAYS}][0-9]{{1,2}}", re.ASCII)
# Tensor dtypes that their bytes describe completely. torch crashes on a quantized tensor made from bytes.
_TENSOR_TYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}  # fmt: skip


class _Header(msgspec.Struct, array_like=True):
    """Precedes the bytes of a tensor or an array."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data: bytes


_header = msgspec.msgpack.Decoder(prepared(_Header))


def pack(value: Any, what: str = "the value") -> bytes:
    """Serialize a value. Raises FleetError for a value that is not plain, which the message calls `what`."""
    try:
        return msgspec.msgpack.encode(_plain(value, what))
    except (OverflowError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise FleetError(f"{what} cannot be sent: {error}") from None


def unpack(data: bytes) -> Any:
    """The value that `pack` serialized. Tensors are on the CPU. Raises FleetError for bytes that `pack` did not
    produce.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_read_extension)
    except (msgspec.MsgspecError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise FleetError(f"cannot decode the value: torchfleet did not write these bytes: {error}") from None


def _plain(value: Any, what: str) -> Any:
    """The value with all nested values converted to types of msgpack or to extensions."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return msgspec.msgpack.Ext(_TENSOR, _tensor_bytes(value, what))
    if isinstance(value, (np.ndarray, np.generic)):
        return msgspec.msgpack.Ext(_ARRAY, _array_bytes(value, what))
    if isinstance(value, list):
        return [_plain(one, f"{what}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, tuple):
        inner = [_plain(one, f"{what}[{i}]") for i, one in enumerate(value)]
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(inner))
    if isinstance(value, dict):
        pairs = [[_plain(key, f"a key of {what}"), _plain(one, f"{what}[{key!r:.100}]")] for key, one in value.items()]
        return msgspec.msgpack.Ext(_PAIRS, msgspec.msgpack.encode(pairs))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise FleetError(
        f"{what} is a {kind}, which cannot be sent to another process: only {_KNOWN} can. Of a model give its "
        "state_dict(), of an object its numbers."
    )


def _tensor_bytes(tensor: torch.Tensor, what: str) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise FleetError(f"{what} is a tensor of layout {tensor.layout} on {tensor.device}: make it dense first")
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TENSOR_TYPES:
        raise FleetError(f"{what} is a tensor of {tensor.dtype}, which cannot be sent: convert it with .to()")
    own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = own.reshape(-1).view(torch.uint8).numpy().tobytes() if own.numel() else b""
    return msgspec.msgpack.encode(_Header(name, list(own.shape), data))


def _array_bytes(array: np.ndarray[Any, Any] | np.generic, what: str) -> bytes:
    own = np.asarray(array)
    if own.dtype.kind not in _PLAIN_ARRAYS:
        raise FleetError(f"{what} is an array of {own.dtype}, which cannot be sent: only arrays of numbers can")
    return msgspec.msgpack.encode(_Header(own.dtype.str, list(own.shape), own.tobytes()))


def _read_extension(code: int, data: memoryview) -> Any:
    if code in (_TUPLE, _PAIRS):
        inner = msgspec.msgpack.decode(data, ext_hook=_read_extension)
        return tuple(inner) if code == _TUPLE else dict(inner)
    if code not in (_TENSOR, _ARRAY):
        raise ValueError(f"extension {code} is unknown")
    header = _header.decode(data)
    if code == _ARRAY:
        if not _ARRAY_TYPE.fullmatch(header.dtype):
            raise ValueError(f"an array of {header.dtype!r:.100}")
        flat = np.frombuffer(bytearray(header.data), np.dtype(header.dtype))
        return flat.reshape(header.shape)[()]  # a numpy scalar becomes a scalar again
    found = _TENSOR_TYPES.get(header.dtype)
    if found is None:
        raise ValueError(f"a tensor of {header.dtype!r:.100}")
    if not header.data and 0 in header.shape:
        return torch.empty(header.shape, dtype=found)
    return torch.frombuffer(bytearray(header.data), dtype=found).reshape(header.shape)
