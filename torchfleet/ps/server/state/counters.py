"""Counters of a server for monitoring: requests, bytes, hot keys, load of the loop."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_PAUSE = 0.05  # seconds between two samples of a table
_NUM_KEYS = 64  # of one sample
_MOST = 2048  # keys that are counted; beyond it the rarer half is dropped
_SHOWN = 8
_LEAST = 3  # appearances in samples below which a key is not called hot
_PERIOD = 1.0  # seconds over which the load is measured


class HotKeys:
    """Counts of sampled keys, by table. A key's count is the number of samples that contain it, not of its pulls."""

    def __init__(self) -> None:
        self.is_on = False  # only if the server is monitored
        self._next: dict[str, float] = {}
        self._counts: dict[str, dict[int, int]] = {}
        self._random = np.random.default_rng()

    def note(self, table: str, keys: npt.NDArray[np.uint64]) -> None:
        """Sample the keys of a pull."""
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
        """The most frequent keys and their counts, by table. Keys are strings: JSON has no 64-bit integers."""
        found: dict[str, list[tuple[str, int]]] = {}
        for table, counts in self._counts.items():
            most = sorted(counts.items(), key=lambda item: -item[1])[:_SHOWN]
            if hot := [(str(key), num) for key, num in most if num >= _LEAST]:
                found[table] = hot
        return found


class LoopLoad:
    """The load of a loop: the share of time in which its thread computes. Measures the thread that calls `look`."""

    def __init__(self) -> None:
        self.busy: float | None = None  # of the last period; None before the first is over
        self._wall = self._cpu = 0.0

    def look(self) -> None:
        """Measure. Call it often: it reads the clock, and once per period the thread's CPU time."""
        now = time.monotonic()
        if now - self._wall < _PERIOD:
            return
        cpu = time.thread_time()
        if self._wall:
            self.busy = min(1.0, (cpu - self._cpu) / (now - self._wall))
        self._wall, self._cpu = now, cpu


@dataclass
class Counters:
    """Since the server was started."""

    num_requests: int = 0
    num_by_command: Counter[int] = field(default_factory=Counter)  # requests that could be decoded; 0: unknown ones
    num_errors: int = 0  # requests that were answered with an error
    bytes_in: int = 0  # of requests
    bytes_out: int = 0  # of replies
    hot_keys: HotKeys = field(default_factory=HotKeys)
    load: LoopLoad = field(default_factory=LoopLoad)  # measured only for a server with a loop
    started: float = field(default_factory=time.monotonic)
