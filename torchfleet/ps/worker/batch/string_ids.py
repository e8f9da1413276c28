"""Strings as ids: `fleet.hash_string` of all strings of an array at once, without a loop in Python.

numpy's arrays of fixed-width text and bytes, and Arrow's arrays, are hashed from their buffers. Lists, arrays of
Python's strings and numpy's strings of variable width are joined first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.base.errors import DataError
from torchfleet.ps.kernels import strings, text

Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_BEHIND = 8  # bytes that the hash may read behind the last string
_KINDS = "expected strings: an array of numpy (text, bytes or Python's str), an array of pyarrow, or a list"
_ARROW = {"string": np.int32, "binary": np.int32, "large_string": np.int64, "large_binary": np.int64}
VIEWS = {"string_view": "large_string", "binary_view": "large_binary"}  # without offsets: they are cast


def are_strings(values: Any) -> bool:
    """Whether these are strings to be hashed. A list or an array of objects is judged by its first element."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind == "O":
            return bool(values.size) and isinstance(values.flat[0], (str, bytes))
        return values.dtype.kind in "UST"
    if isinstance(values, (list, tuple)):
        return bool(values) and isinstance(values[0], (str, bytes))
    return is_arrow(values) and is_string_type(values.type)


def hash_strings(values: Any, seed: int = 0, size: int = 0) -> Ids:
    """The ids of many strings, in an int64 array of their shape: `hash_string(string, seed)`, modulo `size` unless that
    is 0.

    `values`: an array of numpy (text, bytes or Python's str), an array of pyarrow (strings or bytes, also in chunks or
    as a dictionary), or a list. The 64 bits of a hash are read as a signed number.
    """
    if not 0 <= seed < 1 << 64 or not 0 <= size < 1 << 63:
        raise DataError(f"hash_strings: seed and size must be from 0 up to 64 and 63 bits, found {seed} and {size}")
    if is_arrow(values):
        hashes, shape = _of_arrow(values, np.uint64(seed)), (len(values),)
    else:
        array = values if isinstance(values, np.ndarray) else _array(values)
        hashes, shape = _of_array(array, np.uint64(seed)), array.shape
    return (hashes % np.uint64(size) if size else hashes).view(np.int64).reshape(shape)


def with_hashed(ids: Any) -> Any:
    """An embedding's input, with strings replaced by tensors of their ids, also in a slot and in a list of slots. An
    empty array of objects has no strings.
    """
    if isinstance(ids, torch.Tensor):
        return ids
    is_empty = isinstance(ids, np.ndarray) and ids.dtype == object and not ids.size
    if are_strings(ids) or is_empty:
        return torch.from_numpy(hash_strings(ids))
    if isinstance(ids, (list, tuple)):
        made = [with_hashed(part) for part in ids]
        if any(new is not old for new, old in zip(made, ids, strict=True)):
            return made if isinstance(ids, list) else tuple(made)
    return ids


def hash_bytes(given: Sequence[bytes], seed: np.uint64) -> Hashes:
    """Hashes of byte strings."""
    ends = np.cumsum([len(one) for one in given], dtype=np.int64)
    hashes = np.empty(len(given), np.uint64)
    text.hash_all(np.frombuffer(b"".join((*given, bytes(_BEHIND))), np.uint8), ends, seed, hashes)
    return hashes


def _array(values: Any) -> npt.NDArray[Any]:
    """A list becomes an array of Python objects: at a fixed width, one long string would make all others as wide."""
    made: npt.NDArray[Any] = (
        np.asarray(values, dtype=object) if isinstance(values, (list, tuple)) else np.asarray(values)
    )
    return made


def _of_array(array: npt.NDArray[Any], seed: np.uint64) -> Hashes:
    kind = array.dtype.kind
    if kind == "O" or not array.size:
        return hash_bytes([_encoded(one) for one in array.reshape(-1).tolist()], seed)
    if kind == "T":  # numpy's strings of variable width
        return _of_array(array.astype(object), seed)
    if kind not in "US":
        raise DataError(f"hash_strings: {_KINDS}; found numpy's {array.dtype}")
    flat = np.ascontiguousarray(array.reshape(-1), array.dtype.newbyteorder("="))
    hashes = np.empty(len(flat), np.uint64)
    width = flat.dtype.itemsize // (4 if kind == "U" else 1)
    if kind == "S":
        padded = np.concatenate((flat.view(np.uint8), np.zeros(_BEHIND, np.uint8)))
        strings.hash_padded_bytes(padded, width, seed, hashes)
        return hashes
    wrong = strings.hash_padded_text(flat.view(np.uint32), width, seed, hashes)
    if wrong >= 0:
        raise DataError(f"hash_strings: expected text that UTF-8 can encode, found {str(flat[wrong])!r}")
    return hashes


def _encoded(one: Any) -> bytes:
    """Encode as `hash_string` does."""
    if isinstance(one, bytes):
        return one
    if not isinstance(one, str):
        raise DataError(f"hash_strings: {_KINDS} of str or bytes; found {type(one).__name__} in it: {one!r:.40}")
    try:
        return one.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise DataError(f"hash_strings: expected text that UTF-8 can encode, found {one!r:.40}") from error


def is_arrow(values: Any) -> bool:
    """Whether it is an array of pyarrow, which is not imported for this."""
    return type(values).__module__.partition(".")[0] == "pyarrow" and hasattr(values, "null_count")


def is_string_type(kind: Any) -> bool:
    """Whether a type of pyarrow is one of strings or bytes, or a dictionary of them."""
    while hasattr(kind, "index_type"):
        kind = kind.value_type
    return str(kind) in {*_ARROW, *VIEWS}


def _of_arrow(array: Any, seed: np.uint64) -> Hashes:
    if not is_string_type(array.type):
        raise DataError(f"hash_strings: {_KINDS}; found pyarrow's {array.type}")
    if array.null_count:
        raise DataError(
            f"hash_strings: expected strings, found {array.null_count:,} nulls: fill_null('') makes them ''"
        )
    if hasattr(array, "chunks"):
        return np.concatenate([np.empty(0, np.uint64), *(_of_arrow(chunk, seed) for chunk in array.chunks)])
    if hasattr(array, "dictionary"):
        of_words: Hashes = _of_arrow(array.dictionary, seed)[array.indices.to_numpy(zero_copy_only=False)]
        return of_words
    if str(array.type) in VIEWS:
        array = array.cast(VIEWS[str(array.type)])
    return _of_buffers(array, np.dtype(_ARROW[str(array.type)]), seed)


def _of_buffers(array: Any, offset_type: np.dtype[Any], seed: np.uint64) -> Hashes:
    """Hash the strings in Arrow's memory. Strings near its end, beyond which the hash must not read, are copied."""
    num = len(array)
    hashes = np.empty(num, np.uint64)
    if not num:
        return hashes
    _, offset_buffer, data_buffer = array.buffers()
    data = np.frombuffer(data_buffer or b"", np.uint8)
    bounds = np.frombuffer(offset_buffer, offset_type)[array.offset : array.offset + num + 1].astype(np.int64)
    if len(bounds) != num + 1 or bounds[0] < 0 or bounds[-1] > len(data) or (bounds[1:] < bounds[:-1]).any():
        raise DataError("hash_strings: expected an array that Arrow takes for valid, found offsets out of its memory")
    num_inside = int(np.searchsorted(bounds[1:], len(data) - _BEHIND, side="right"))
    first, middle = int(bounds[0]), int(bounds[num_inside])
    text.hash_all(data[first:], bounds[1 : num_inside + 1] - first, seed, hashes[:num_inside])
    tail = np.concatenate((data[middle : bounds[-1]], np.zeros(_BEHIND, np.uint8)))
    text.hash_all(tail, bounds[num_inside + 1 :] - middle, seed, hashes[num_inside:])
    return hashes
