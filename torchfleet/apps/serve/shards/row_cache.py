"""Rows of one table that were read last, in a fixed amount of memory."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_WAYS = 8  # places that a key may be in
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads consecutive ids over all sets


class RowCache:
    """A set-associative cache: a key belongs to one set of eight places, and replaces the one used longest ago.

    For rows that do not change, so a row that is here is right. Any thread may call it.
    """

    def __init__(self, dim: int, max_bytes: int) -> None:
        """Takes at most `max_bytes` of memory, but no less than two sets."""
        set_bytes = _WAYS * (4 * dim + 16)
        self._bits = max(1, (max_bytes // set_bytes).bit_length() - 1)
        num = _WAYS << self._bits
        self._keys = np.zeros(num, np.int64)
        self._used = np.zeros(num, np.int64)  # when a place was used last; 0: it is empty
        self._rows = np.zeros((num, dim), np.float32)
        self._now = 0
        self._lock = threading.Lock()
        self.num_hits = self.num_misses = 0

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._used.nbytes + self._rows.nbytes

    def take(self, keys: Keys) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """(rows of `keys`, mask of the keys that are here). Missing rows are zeros. The caller owns both arrays."""
        rows = np.zeros((len(keys), self._rows.shape[1]), np.float32)
        places = self._places(keys)
        with self._lock:
            is_same = (self._keys[places] == keys[:, None]) & (self._used[places] > 0)
            is_here = is_same.any(axis=1)
            found = places[is_here, is_same.argmax(axis=1)[is_here]]
            self._now += 1
            self._used[found] = self._now
            rows[is_here] = self._rows[found]
            self.num_hits += len(found)
            self.num_misses += len(keys) - len(found)
        return rows, is_here

    def put(self, keys: Keys, rows: Floats) -> None:
        """Keep the rows of distinct keys. Of several that would take the same place, the first is kept."""
        places = self._places(keys)
        with self._lock:
            oldest = self._used[places].argmin(axis=1)
            taken, first = np.unique(places[np.arange(len(keys)), oldest], return_index=True)
            self._now += 1
            self._keys[taken], self._rows[taken], self._used[taken] = keys[first], rows[first], self._now

    def _places(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The places where each key may be, [len(keys), ways]."""
        sets = (keys.view(np.uint64) * _SPREAD) >> np.uint64(64 - self._bits)
        places: npt.NDArray[np.int64] = sets.astype(np.int64)[:, None] * _WAYS + np.arange(_WAYS)
        return places
