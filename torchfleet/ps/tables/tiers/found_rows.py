"""Where rows of the last requests were found: a pull that was foreseen, and the push behind it, look there first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.key_search import keep_found
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.recent_pulls import Mark, mark_of

FEWEST_KEYS = 256  # smallest request that is kept: a search for fewer keys is cheap
MOST_REQUESTS = 16
MOST_KEYS = 1 << 19  # of all requests together: 8 MB


@dataclass(frozen=True)
class _Request:
    keys: Keys
    at: Rows
    tick: int  # at which all these rows were used, or later; 0: not all of them


class FoundRows:
    """Keys and row numbers of the last requests. Unlike RecentPulls it may be out of date, because rows leave memory
    while a request waits. Only rows that were not used since some tick do: if all rows of a request were used later,
    they are where they were. Otherwise each is looked at again, which still takes less time than a search.
    """

    def __init__(self, index: KeyMap, used: npt.NDArray[np.uint32]) -> None:
        """`used`: by row number, NEVER if the row is not in use. A row in use holds the key that the map finds there; a
        free one holds its last key.
        """
        self._index, self._used = index, used
        self._requests: OrderedDict[Mark, _Request] = OrderedDict()
        self._num_keys = self._left = 0

    def note(self, keys: Keys, at: Rows, tick: int = 0) -> None:
        """Remember that these keys are in these rows, -1 for none, which were used at `tick`. Copies the keys."""
        if not FEWEST_KEYS <= len(keys) <= MOST_KEYS:
            return
        mark = mark_of(keys)
        self._drop(mark)
        self._requests[mark] = _Request(keys.copy(), at, tick if at.min() >= 0 else 0)
        self._num_keys += len(keys)
        while len(self._requests) > MOST_REQUESTS or self._num_keys > MOST_KEYS:
            self._drop(next(iter(self._requests)))

    def note_left(self, tick: int) -> None:
        """Some rows that were used at this tick or before, and not since, have left memory."""
        self._left = max(self._left, tick)

    def forget(self) -> None:
        """Drop all requests: rows that were used lately are gone, or ticks have new numbers."""
        self._requests.clear()
        self._num_keys = self._left = 0

    def rows_of(self, keys: Keys, tick: int, num_words: int) -> Rows | None:
        """The row numbers of exactly these keys in this order, which the caller does not change if none is -1; None if
        the request is not known. -1: the row is not where it was, or was nowhere.

        Rows that are looked at are marked as used at `tick`, and the first `num_words` words behind their keys are left
        in the cache.
        """
        known = self._requests.get(mark_of(keys)) if len(keys) >= FEWEST_KEYS else None
        if known is None or not np.array_equal(known.keys, keys):
            return None
        if known.tick > self._left:
            return known.at
        at: Rows = known.at.copy()
        keep_found(self._index.words, self._used, np.uint32(tick), keys, at, KEY_WORDS + num_words)
        return at

    def _drop(self, mark: Mark) -> None:
        known = self._requests.pop(mark, None)
        if known is not None:
            self._num_keys -= len(known.keys)
