"""Which keys are asked for most, from a small sample of the pulls."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

_PAUSE = 0.05  # seconds between two samples of a table
_NUM_KEYS = 64  # of one sample
_MOST = 2048  # keys that are counted; beyond it the rarer half is forgotten
_SHOWN = 8
_LEAST = 3  # appearances in samples below which a key is not called hot


class HotKeys:
    """Counts of sampled keys, by table. A key's count is that of samples in which it was, not of all its pulls."""

    def __init__(self) -> None:
        self.is_on = False  # only where somebody watches
        self._next: dict[str, float] = {}
        self._counts: dict[str, dict[int, int]] = {}
        self._random = np.random.default_rng()

    def note(self, table: str, keys: npt.NDArray[np.uint64]) -> None:
        """A pull has asked for these, each once."""
        now = time.monotonic()
        if not len(keys) or now < self._next.get(table, 0.0):
            return
        self._next[table] = now + _PAUSE
        stride = max(1, len(keys) // _NUM_KEYS)
        counts = self._counts.setdefault(table, {})
        for key in keys[int(self._random.integers(stride)) :: stride][:_NUM_KEYS].tolist():
            counts[key] = counts.get(key, 0) + 1
        if len(counts) > _MOST:
            kept = sorted(counts.items(), key=lambda item: -item[1])[: _MOST // 2]
            self._counts[table] = {key: num // 2 for key, num in kept if num > 1}

    def top(self) -> dict[str, list[tuple[str, int]]]:
        """By table, the keys seen most often and how often. A key is a text: JSON has no integers of 64 bits."""
        found: dict[str, list[tuple[str, int]]] = {}
        for table, counts in self._counts.items():
            most = sorted(counts.items(), key=lambda item: -item[1])[:_SHOWN]
            if hot := [(str(key), num) for key, num in most if num >= _LEAST]:
                found[table] = hot
        return found
