"""The arrays of a message, and many small arrays in a frame that they share.

Every frame and every object has a fixed cost, however small it is. A message for many small tables has one frame, and
no object per table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u8"), 3: np.dtype("<f4"), 4: np.dtype("<f8")}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BYTES, KEYS, FLOATS, DOUBLES = DTYPES  # the codes
# An array in a header: as struct's "<IBxxxIQ".
ENTRY = np.dtype(
    {
        "names": ["number", "code", "columns", "rows"],
        "formats": ["<u4", "u1", "<u4", "<u8"],
        "offsets": [0, 4, 8, 12],
        "itemsize": 20,
    }
)
_SIZES = np.array([DTYPES[code].itemsize if code in DTYPES else 0 for code in range(256)], np.uint64)
_MOST_ROWS = 1 << 30

Words = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Array:
    """An array frame and the number of its table. The data is two-dimensional, (rows, columns)."""

    number: int  # of the table; in a reply to GATHER, of the worker that sent the array; else 0
    data: npt.NDArray[Any]


class JoinedArrays(Sequence[Array]):
    """Arrays in one frame, each filled up with zeros to whole words. An Array is made when it is accessed.

    `entries`: as they are in the header. `starts`: the word at which each array begins, and the number of all words.
    """

    def __init__(self, entries: npt.NDArray[Any], words: Words, starts: npt.NDArray[np.int64]) -> None:
        self.entries, self.words, self.starts = entries, words, starts

    @classmethod
    def room_for(cls, entries: npt.NDArray[Any]) -> JoinedArrays:
        """Uninitialized arrays of these sizes: the caller writes the numbers, and the zeros behind each array."""
        starts = _starts(entries)
        return cls(entries, np.empty(int(starts[-1]), np.uint64), starts)

    @classmethod
    def split(cls, entries: npt.NDArray[Any], words: Words) -> JoinedArrays | None:
        """The arrays with these entries in a received frame; None if they do not fill it, or an entry is wrong."""
        rows, columns = entries["rows"], entries["columns"]
        if rows.max(initial=0) > _MOST_ROWS or not _SIZES[entries["code"]].all():
            return None
        if (rows * columns.astype(np.uint64)).max(initial=0) > words.nbytes:  # below 2**62: the product is exact
            return None
        starts = _starts(entries)
        return cls(entries, words, starts) if starts[-1] == len(words) else None

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...

    def __getitem__(self, index: int | slice) -> Array | list[Array]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return _array(self.words.view(np.uint8), self.entries[index].tolist(), int(self.starts[:-1][index]))

    def __iter__(self) -> Iterator[Array]:
        data = self.words.view(np.uint8)
        for entry, start in zip(self.entries.tolist(), self.starts.tolist(), strict=False):
            yield _array(data, entry, start)

    @property
    def floats(self) -> npt.NDArray[np.float32]:
        """The frame as float32 numbers, two per word."""
        return self.words.view(np.float32)


def _array(data: npt.NDArray[np.uint8], entry: tuple[int, int, int, int], start: int) -> Array:
    """`start`: the word of `data` at which the array begins."""
    number, code, columns, rows = entry
    dtype = DTYPES[code]
    own = data[8 * start : 8 * start + rows * columns * dtype.itemsize].view(dtype)
    return Array(number, own.reshape(rows, columns))


def _starts(entries: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    num_bytes = entries["rows"] * entries["columns"] * _SIZES[entries["code"]]
    starts = np.zeros(len(entries) + 1, np.int64)
    np.cumsum((num_bytes + np.uint64(7)) >> np.uint64(3), out=starts[1:], dtype=np.int64)
    return starts
