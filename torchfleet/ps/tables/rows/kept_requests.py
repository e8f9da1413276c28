"""Keeps what was found for the keys of the last requests: the next request for the same keys need not search."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Mark = tuple[int, int, int, int]
Found = TypeVar("Found")

FEWEST_KEYS = 256  # smallest request that is kept: a search for fewer keys is cheap


class KeptRequests(Generic[Found]):
    """The last requests with their keys; the oldest are dropped first."""

    def __init__(self, most_requests: int, most_keys: int) -> None:
        """`most_keys`: the most keys of all requests together."""
        self.num_keys, self._most_requests, self._most_keys = 0, most_requests, most_keys
        self._kept: OrderedDict[Mark, tuple[Keys, Found]] = OrderedDict()

    def note(self, keys: Keys, found: Found) -> None:
        """Keep what was found for these keys, unless they are few or too many. Copies `keys`, which may lie in a
        message buffer.
        """
        if not FEWEST_KEYS <= len(keys) <= self._most_keys:
            return
        mark = mark_of(keys)
        self._drop(mark)
        self._kept[mark] = keys.copy(), found
        self.num_keys += len(keys)
        while len(self._kept) > self._most_requests or self.num_keys > self._most_keys:
            self._drop(next(iter(self._kept)))

    def get(self, keys: Keys) -> Found | None:
        """What was found for exactly these keys in this order; None if that is not known."""
        kept = self._kept.get(mark_of(keys)) if len(keys) >= FEWEST_KEYS else None
        return kept[1] if kept is not None and np.array_equal(kept[0], keys) else None

    def take(self, keys: Keys) -> Found | None:
        """As `get`; the request is not kept any longer."""
        kept = self._drop(mark_of(keys)) if len(keys) >= FEWEST_KEYS else None
        return kept[1] if kept is not None and np.array_equal(kept[0], keys) else None

    def forget(self) -> None:
        """Drop all requests."""
        self._kept.clear()
        self.num_keys = 0

    def _drop(self, mark: Mark) -> tuple[Keys, Found] | None:
        kept = self._kept.pop(mark, None)
        if kept is not None:
            self.num_keys -= len(kept[0])
        return kept


def mark_of(keys: Keys) -> Mark:
    """A cheap fingerprint of a request. Equality is decided by comparing all keys."""
    return len(keys), int(keys[0]), int(keys[len(keys) // 2]), int(keys[-1])
