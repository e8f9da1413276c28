"""Tensors of any type in a block of float32: their bytes, two to a word, each word an integer from 0 to 65535.

A table holds finite float32 values. The bytes of an int64 or a bfloat16 read as float32 may be NaN, but float32
represents every 16-bit integer exactly. So counters, masks and frozen half-precision weights are handled like all dense
values: sent to every worker, saved, and resharded. They need no separate kind of array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_WORD = np.dtype("<u2")


def num_words(num_bytes: int) -> int:
    return -(-num_bytes // _WORD.itemsize)


def to_words(data: Bytes) -> Floats:
    """Encode bytes as words; an odd number of bytes is padded with a zero byte."""
    padded = np.zeros(_WORD.itemsize * num_words(len(data)), np.uint8)
    padded[: len(data)] = data
    return padded.view(_WORD).astype(np.float32)


def to_bytes(words: Floats, num_bytes: int, name: str) -> Bytes:
    """The inverse of `to_words`, for the tensor `name`. Raises CheckpointError if `words` are not valid."""
    flat = np.ascontiguousarray(words).reshape(-1)
    whole = flat.astype(_WORD) if len(flat) and 0 <= flat.min() <= flat.max() < 1 << 16 else np.empty(0, _WORD)
    if len(flat) != num_words(num_bytes) or not np.array_equal(whole, flat):
        raise CheckpointError(
            f"'{name}': expected {num_words(num_bytes):,} whole numbers from 0 to 65535 (two bytes each), found others"
        )
    return whole.view(np.uint8)[:num_bytes]


def to_numbers(words: Floats, dtype: str, shape: Sequence[int], name: str) -> npt.NDArray[Any]:
    """The tensor's numbers, flat, for comparison: bfloat16 as float32, other types that numpy lacks as their bytes."""
    num = int(np.prod(shape, dtype=np.int64))
    if dtype == "bfloat16":  # the upper half of a float32
        halves = to_bytes(words, 2 * num, name).view(_WORD)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    try:
        known = np.dtype(dtype).newbyteorder("<")
    except TypeError:
        return to_bytes(words, len(words) * _WORD.itemsize, name)
    return to_bytes(words, num * known.itemsize, name).view(known)
