"""Where rows of the last requests were found: a pull that was foreseen, and the push after it, look here first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.key_search import keep_found
from torchfleet.ps.tables.rows import kept_requests
from torchfleet.ps.tables.rows.kept_requests import KeptRequests
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, KeyMap, Keys, Rows

MOST_REQUESTS = 16
MOST_KEYS = 1 << 19  # of all requests together: 8 MB


class FoundRows:
    """Keys and row numbers of the last requests. Unlike RecentPulls they may be out of date, because rows leave memory
    while a request waits. Only rows that were not used since some tick leave: if all rows of a request were used later,
    they are where they were. Otherwise each row is checked again, which still takes less time than a search.
    """

    def __init__(self, index: KeyMap, used: npt.NDArray[np.uint32]) -> None:
        """`used`: by row number, NEVER if the row is not in use. A row in use holds the key that the map finds there; a
        free one holds its last key.
        """
        self._index, self._used = index, used
        # rows, and a tick at or after which all of them were used; 0: not known, or not all keys have rows
        self._requests: KeptRequests[tuple[Rows, int]] = KeptRequests(MOST_REQUESTS, MOST_KEYS)
        self._left = 0

    def note(self, keys: Keys, at: Rows, tick: int = 0) -> None:
        """Remember that these keys are in these rows, -1 for no row, which were used at `tick`. Copies the keys."""
        if len(keys) >= kept_requests.FEWEST_KEYS:
            self._requests.note(keys, (at, tick if at.min() >= 0 else 0))

    def note_left(self, tick: int) -> None:
        """Note that rows which were used at this tick or before, and not since, have left memory."""
        self._left = max(self._left, tick)

    def forget(self) -> None:
        """Drop all requests: rows that were used lately are gone, or ticks have new numbers."""
        self._requests.forget()
        self._left = 0

    def rows_of(self, keys: Keys, tick: int, num_words: int) -> Rows | None:
        """The row numbers of exactly these keys in this order; None if the request is not known. -1: the row is not
        where it was, or the key had no row. The caller may change the array only if it has a -1.

        Rows that are checked again are marked as used at `tick`, and the first `num_words` words behind their keys are
        left in the cache.
        """
        known = self._requests.get(keys)
        if known is None:
            return None
        at, used_at = known
        if used_at > self._left:
            return at
        at = np.array(at)
        keep_found(self._index.words, self._used, np.uint32(tick), keys, at, KEY_WORDS + num_words)
        return at
