"""Rows on the network in fewer bits than float32: values of a pull's reply, gradients of a push.

A row is the words of its values (rows/codecs.py) as bytes. Statistics that follow the gradients of a row, which are
counts and numbers of slots, stay float32. Which type it is follows from the table's description on both sides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import WireError
from torchfleet.ps.tables.rows.codecs import Codec, Dice, Floats, Keys, codec_of
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED, is_pushed
from torchfleet.ps.tables.settings.spec import TableSpec

Bytes = npt.NDArray[np.uint8]


class WireRows:
    """The rows of one table in one direction. `num_more`: float32 numbers that may follow the values of a row."""

    def __init__(self, codec: Codec, num_more: int = 0) -> None:
        self._codec, self._num_more = codec, num_more

    def encode(self, keys: Keys, wide: Floats, dice: Dice | None = None) -> Bytes:
        """Rows of values, and of what follows them if `wide` has it; stochastic rounding with dice."""
        wide = np.ascontiguousarray(wide)
        first, dim = self._codec.num_words, self._codec.dim
        words = np.zeros((len(wide), first + wide.shape[1] - dim), np.uint32)
        self._codec.narrow(keys, wide, words, dice)
        words[:, first:] = wide.view(np.uint32)[:, dim:]
        return words.view(np.uint8)

    def of_words(self, stored: Floats) -> Bytes:
        """Rows of values as a table of this type stores them: no rounding."""
        return stored.view(np.uint8)

    def decode(self, rows: npt.NDArray[Any], num_rows: int, whose: str) -> Floats:
        """The inverse of `encode`. Raises WireError, which begins with `whose`, if these are not such rows."""
        first, dim = self._codec.num_words, self._codec.dim
        widths = {4 * first, 4 * (first + self._num_more)}
        if rows.dtype != np.uint8 or rows.ndim != 2 or len(rows) != num_rows or rows.shape[1] not in widths:
            raise WireError(
                f"{whose}: expected {num_rows} rows of {self._codec.name} in {sorted(widths)} bytes, "
                f"found {rows.shape} {rows.dtype}"
            )
        words = np.ascontiguousarray(rows).reshape(-1).view(np.uint32).reshape(num_rows, rows.shape[1] // 4)
        if not words.flags.aligned:  # a frame of bytes may lie anywhere; kernels need alignment
            words = words.copy()
        wide = np.empty((num_rows, dim + words.shape[1] - first), np.float32)
        self._codec.widen(words, wide)
        wide.view(np.uint32)[:, dim:] = words[:, first:]
        return wide


def pulled_rows(spec: TableSpec) -> WireRows | None:
    """How values of this table travel; None: as float32."""
    is_plain = spec.is_dense or spec.format.pulled == "float32"
    return None if is_plain else WireRows(codec_of(spec.format.pulled, spec.dim))


def pushed_rows(spec: TableSpec) -> WireRows | None:
    """How gradients of this table travel; None: as float32."""
    if spec.is_dense or spec.format.pushed == "float32":
        return None
    return WireRows(codec_of(spec.format.pushed, spec.dim), NUM_PUSHED if is_pushed(spec) else 0)
