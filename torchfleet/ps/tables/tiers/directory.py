"""The directory of a table on two tiers: where the row of each key is, in about nine bytes a row."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import directory as kernels
from torchfleet.ps.kernels.directory import BUCKET, NUM_SUBS, PLACE_BITS, TAG_BITS
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.rows.memory import Memory

Places = npt.NDArray[np.int64]
MAX_PLACE = (1 << PLACE_BITS) - 2
NUM_TAGS = 1 << TAG_BITS
MAX_LOAD = 0.92
GROWTH = 1.07  # of the buckets of a sub-map: its load stays between MAX_LOAD and MAX_LOAD / GROWTH
FIRST_BUCKETS = 2
_PAGE_SLOTS = 512


class Directory:
    """Places of the rows of distinct keys. Places from `first_cold` on are on disk; the lower ones are row numbers."""

    def __init__(self, max_keys: int, first_cold: int) -> None:
        # A sub-map holds its share of the keys, give or take eight deviations of a random distribution.
        share = max_keys / NUM_SUBS
        num_slots = int((share + 8 * share**0.5 + 64) * GROWTH / MAX_LOAD) + BUCKET
        self._max_buckets = -(-num_slots // _PAGE_SLOTS) * _PAGE_SLOTS // BUCKET
        self.max_keys, self.num_keys, self.first_cold = max_keys, 0, first_cold
        self._salts = np.frombuffer(os.urandom(16), np.uint64).copy()
        self._slots: Keys = (
            Memory(8 * NUM_SUBS * BUCKET * self._max_buckets, is_sparse=True)
            .array(np.uint64)[: NUM_SUBS * BUCKET * self._max_buckets]
            .reshape(NUM_SUBS, -1)
        )
        over = Memory(NUM_SUBS * self._max_buckets, is_sparse=True).array(np.uint8)
        self._over: npt.NDArray[np.uint8] = over[: NUM_SUBS * self._max_buckets].reshape(NUM_SUBS, -1)
        self._sizes = np.full(NUM_SUBS, FIRST_BUCKETS, np.uint64)
        self._counts = np.zeros(NUM_SUBS, np.int64)
        self._limits = np.full(NUM_SUBS, int(FIRST_BUCKETS * BUCKET * MAX_LOAD), np.int64)
        self._arrays = self._slots, self._over, self._sizes, self._salts  # in the order of the kernels' arguments

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots and counters in use."""
        return int(self._sizes.sum()) * (8 * BUCKET + 1)

    def find_cold(self, keys: Keys, skips: npt.NDArray[np.int64]) -> Places:
        """For each key, the place on disk of its row or of another row with the same tag; -1 if no such place is left.

        `skips`: the number of such places that are known to belong to other keys.
        """
        places = np.empty(len(keys), np.int64)
        kernels.find(*self._arrays, keys, skips, np.uint64(self.first_cold), places)
        return places

    def insert(self, keys: Keys, places: Places) -> None:
        """Enter keys that are not in the map. Raises TableError, with nothing changed, if there is no room."""
        if self.num_keys + len(keys) > self.max_keys:
            raise TableError(f"a directory of {self.max_keys:,} keys is full")
        done = 0
        while done < len(keys):
            done = kernels.insert(*self._arrays, self._counts, self._limits, keys, places, done)
            if done < len(keys):
                self._grow()
        self.num_keys += len(keys)

    def reserve(self, num: int) -> None:
        """Make room for `num` new keys at once, up to `max_keys` keys in all. For loading."""
        share = min(self.num_keys + num, self.max_keys) / NUM_SUBS
        buckets = min(int(share / MAX_LOAD / BUCKET), self._max_buckets)  # a little less than most sub-maps will need
        for sub in np.flatnonzero(self._sizes < buckets).tolist():
            self._grow_to(sub, buckets)

    def _grow(self) -> None:
        for sub in np.flatnonzero(self._counts >= self._limits).tolist():
            size = int(self._sizes[sub])
            larger = min(max(size + 1, int(size * GROWTH)), self._max_buckets)
            if larger == size:
                raise RuntimeError("a sub-map of a directory is full: its hash no longer spreads. This is a bug.")
            self._grow_to(sub, larger)

    def _grow_to(self, sub: int, size: int) -> None:
        kernels.grow(*self._arrays[:3], sub, size, np.empty(int(self._sizes[sub]) * BUCKET, np.uint64))
        self._limits[sub] = int(size * BUCKET * MAX_LOAD)

    def move(self, keys: Keys, old: Places, new: Places) -> None:
        """Note that rows have moved from the places `old` to `new`."""
        self._expect(kernels.replace(*self._arrays, self._counts, keys, old, new))

    def remove(self, keys: Keys, places: Places) -> None:
        """Forget keys, whose rows are at these places."""
        self._expect(kernels.replace(*self._arrays, self._counts, keys, places, np.full(len(keys), -1, np.int64)))
        self.num_keys -= len(keys)

    def places_from(self, cursor: int, num: int) -> tuple[Places, int]:
        """(the places of at most `num` rows, the next cursor, 0 at the end). Start with cursor 0. A row that moves
        comes exactly once, because the order is that of the hashes. Returns more rows if that many have the same tag.
        """
        sub, first = cursor >> TAG_BITS, cursor & (NUM_TAGS - 1)
        places = np.empty(num, np.int64)
        span = max(1, int(num * 0.9 / max(1, int(self._counts[sub])) * NUM_TAGS))
        while True:
            last = min(first + span, NUM_TAGS) - 1
            found = kernels.collect(*self._arrays[:3], sub, first, last, places)
            if found <= num:
                behind = (sub << TAG_BITS) + last + 1
                return places[:found], behind if behind < NUM_SUBS << TAG_BITS else 0
            if span == 1:  # more rows with one tag than were asked for
                places = np.empty(2 * len(places), np.int64)
                num = len(places)
            span = max(1, span // 2)

    @staticmethod
    def _expect(num_lost: int) -> None:
        if num_lost:
            raise RuntimeError(f"{num_lost} rows are not where the directory says. This is a bug.")
