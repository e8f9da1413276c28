"""What a server counts for people who watch it: requests, bytes, the keys asked for most, how busy its loop is."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_PAUSE = 0.05  # seconds between two samples of a table
_NUM_KEYS = 64  # of one sample
_MOST = 2048  # keys that are counted; beyond it the rarer half is forgotten
_SHOWN = 8
_LEAST = 3  # appearances in samples below which a key is not called hot
_PERIOD = 1.0  # seconds that a share of busy time is taken over


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


class LoopLoad:
    """How busy a loop is: the share of time in which its thread computes. The thread that calls `look` is measured."""

    def __init__(self) -> None:
        self.busy: float | None = None  # of the last period; None before the first is over
        self._wall = self._cpu = 0.0

    def look(self) -> None:
        """Often: it costs a look at the clock, and once in a period one at the thread's time."""
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
    load: LoopLoad = field(default_factory=LoopLoad)  # only a server with a loop is looked at
    started: float = field(default_factory=time.monotonic)
