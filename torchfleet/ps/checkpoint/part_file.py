"""Part files: safetensors, written and read without a copy of the arrays, each with a checksum of all its bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError, TableError
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.checkpoint.manifest_parts import Part, Table
from torchfleet.ps.tables.rows.codecs import SCALE
from torchfleet.ps.tables.settings.policy import BLOCK_BYTES

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
    "BF16": np.dtype("<u2"),  # numpy has no bfloat16, and no array here has whole numbers of 16 bits
    "F16": np.dtype("<f2"),
    "I8": np.dtype("i1"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 1 << 20
# Bytes of one number, by safetensors' names of types.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}

# Arrays that may accompany the keys, in the order of an export's columns.
STATISTICS: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("count", "seen", "born", "tick"), np.dtype("<u4")),
    **dict.fromkeys(("show", "click"), np.dtype("<f4")),
    "slot": np.dtype("<u4"),
}

NARROW_TYPES = {np.dtype("<u2"): "bfloat16", np.dtype("<f2"): "float16", np.dtype("i1"): "int8"}  # of row_values

Expected = dict[str, tuple[Any, tuple[int, ...]]]  # type and shape by name
Arrays = dict[str, npt.NDArray[Any]]
Pieces = dict[str, list[npt.NDArray[Any]]]  # each tensor in pieces, to be written one after the other


class TensorEntry(msgspec.Struct):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def encode(arrays: Arrays) -> list[Any]:
    """The file's bytes, as buffers to be written one after the other."""
    return encode_pieces({name: [array] for name, array in arrays.items()})


def encode_pieces(tensors: Pieces) -> list[Any]:
    """As `encode`, for tensors in pieces along their first dimension, which are not concatenated."""
    described = []
    for name, pieces in tensors.items():
        shape = list(pieces[0].shape)
        if len(pieces) > 1:
            shape[0] = sum(len(piece) for piece in pieces)
        described.append((name, _NAMES[pieces[0].dtype], shape, sum(piece.nbytes for piece in pieces)))
    buffers = [np.ascontiguousarray(piece).data for pieces in tensors.values() for piece in pieces]
    return [header(entries_of(described), {}), *buffers]


def header(entries: dict[str, TensorEntry], metadata: dict[str, str]) -> bytes:
    """The bytes before the tensors."""
    body = msgspec.json.encode({"__metadata__": metadata, **entries} if metadata else entries)
    body += b" " * (-len(body) % 8)  # aligns the tensors
    return len(body).to_bytes(8, "little") + body


def entries_of(tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> dict[str, TensorEntry]:
    """Header entries from (name, dtype, shape, bytes) of adjacent tensors."""
    entries, at = {}, 0
    for name, dtype, shape, size in tensors:
        entries[name] = TensorEntry(dtype, list(shape), (at, at + size))
        at += size
    return entries


def checksum(buffers: list[Any]) -> int:
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(memoryview(buffer).cast("B") if memoryview(buffer).nbytes else b"", crc)
    return crc


def decode(data: bytes | memoryview, place: str) -> Arrays:
    """The arrays as views of the file's bytes. Raises CheckpointError if it is not such a file."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MAX_HEADER, len(data) - 8):
        raise CheckpointError(f"{place}: expected a safetensors header, found one of {size:,} bytes in {len(data):,}")
    try:
        entries = msgspec.json.decode(data[8 : 8 + size], type=prepared(dict[str, TensorEntry]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{place}: its safetensors header is damaged: {error}") from None
    body = np.frombuffer(data, np.uint8)[8 + size :]
    return {name: _array(entry, body, f"{place}, tensor '{name}'") for name, entry in entries.items()}


def _array(entry: TensorEntry, body: npt.NDArray[np.uint8], place: str) -> npt.NDArray[Any]:
    dtype = _DTYPES.get(entry.dtype)
    start, stop = entry.data_offsets
    num = 1
    for length in entry.shape:
        num *= length
    if dtype is None or min([start, *entry.shape]) < 0 or stop > len(body) or stop - start != num * dtype.itemsize:
        raise CheckpointError(f"{place}: {entry.dtype} {entry.shape} at {start}:{stop} cannot be in this file")
    try:
        return body[start:stop].view(dtype).reshape(entry.shape)
    except ValueError as error:  # more or longer dimensions than an array can have
        raise CheckpointError(f"{place}: {error}") from None


def check_arrays(saved: Table, part: Part, arrays: Arrays) -> None:
    """Raise TableError if a part does not have the arrays of its kind, in types and shapes."""
    num: int = part.rows
    expected: Expected = {"keys": (np.dtype("<u8"), (num,))}
    if part.kind == "sketch":
        expected = {"blocks": (np.dtype("u1"), (num, BLOCK_BYTES))}
    elif saved.is_dense:
        expected = {"values": (np.dtype("<f4"), (1 + saved.num_states, num))}
    elif part.kind == "rows" and "row_values" in arrays:
        expected |= _narrow(saved, num, arrays["row_values"].dtype)
    elif part.kind == "rows":
        expected["rows"] = np.dtype("<f4"), (num, saved.num_words)
    known = expected if saved.is_dense or part.kind == "sketch" else {**expected, **_columns(num)}
    if not set(expected) <= set(arrays) <= set(known):
        raise TableError(f"expected {', '.join(expected)}, found {', '.join(arrays) or 'nothing'}")
    for name, array in arrays.items():
        if (array.dtype, array.shape) != known[name]:
            raise TableError(
                f"expected {name} of shape {known[name][1]}, found {array.dtype} {array.shape}. Was "
                f"table '{saved.name}' changed within one chain of saves?"
            )


def _narrow(saved: Table, num: int, dtype: np.dtype[Any]) -> Expected:
    """The arrays of narrow rows (narrow_arrays.py)."""
    if dtype not in NARROW_TYPES:
        raise TableError(f"expected row_values of {', '.join(NARROW_TYPES.values())}, found {dtype}")
    found: Expected = {"row_values": (dtype, (num, saved.dim))}
    if NARROW_TYPES[dtype] == "int8":
        found[SCALE] = np.dtype("<f4"), (num,)
    if saved.num_words > saved.dim:
        found["row_state"] = np.dtype("<f4"), (num, saved.num_words - saved.dim)
    return found


def _columns(num: int) -> dict[str, tuple[Any, tuple[int, ...]]]:
    return {name: (dtype, (num,)) for name, dtype in STATISTICS.items()}
