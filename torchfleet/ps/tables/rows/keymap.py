"""A growing map from keys to rows of one store: kernels/hashmap.py and key_search.py, and the memory they use."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import hashmap, key_search
from torchfleet.ps.kernels.hashing import new_secret
from torchfleet.ps.kernels.hashmap import BUCKET, MOVED, NEW, NEXT_ROW, NUM_FREE, OLD, SECRET
from torchfleet.ps.kernels.rows import gather
from torchfleet.ps.kernels.team import TEAM
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.rows.recent_pulls import RecentPulls
from torchfleet.ps.tables.settings.table_size import HOW_TO_SET

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

MAX_LOAD = 0.72
GROWTH = 1.25
FIRST_BUCKETS = 64
SPARE_BUCKETS = 64  # in addition to one for each home: for keys that are added to old slots while these are moved
SMALL = 1 << 14  # buckets; a smaller map doubles, and moves all buckets at once (under a millisecond)
MOVES_PER_KEY = 2  # buckets moved per new key: the move ends when the old slots have filled up by 1/16 more
EASY_KEYS = 1 << 16  # keys of a map of less than a megabyte
SETTLED_BUCKETS = 1 << 11  # buckets moved per idle call: a fraction of a millisecond
KEY_WORDS = 2
FEWEST_SHARED = 2048  # fewest keys per thread, if several threads share the work


class KeyMap:
    """Rows of `num_words` float32 words behind their key; any 64-bit key. A call takes at most a few thousand keys,
    except `read`.
    """

    offset = KEY_WORDS

    def __init__(self, num_words: int, max_bytes: int) -> None:
        self.width = KEY_WORDS + num_words
        self.max_rows = min(max_bytes // (4 * self.width), (1 << 32) - 2)
        if self.max_rows < 1:
            raise TableError(
                f"a row takes {4 * self.width:,} bytes, but max_table_bytes is {max_bytes:,}. Raise it: {HOW_TO_SET}."
            )
        self._store_memory = Memory(4 * self.width * self.max_rows)
        self.store: npt.NDArray[np.float32] = self._store_memory.array(np.float32)
        words = self.store.view(np.uint32)[: self.max_rows * self.width]
        self.words: npt.NDArray[np.uint32] = words.reshape(self.max_rows, self.width)
        self._free_rows: npt.NDArray[np.uint32] = Memory(4 * self.max_rows).array(np.uint32)
        self.recent = RecentPulls(self.max_rows)
        self._state = np.concatenate([np.zeros(SECRET, np.int64), new_secret()])
        self._num_buckets = np.ones(2, np.uint64)
        self._slots_memory = [Memory(0), Memory(0)]
        self._slots: list[npt.NDArray[np.uint64]] = [np.zeros(2 * BUCKET, np.uint64), np.zeros(0, np.uint64)]
        self.num_keys = 0
        self._grows_at = 0  # number of keys at which the map must grow
        self._arrays: tuple[Any, ...] = ()  # in the order of the kernels' arguments
        self._open(FIRST_BUCKETS)
        self._finish_migration()

    @property
    def load_factor(self) -> float:
        return self.num_keys / (int(self._num_buckets[NEW]) * BUCKET)

    @property
    def num_bytes(self) -> int:
        """Bytes in use: slots, rows up to the highest ever used, the list of free rows, and recent pulls."""
        (old, new), moved = self._num_buckets.tolist(), int(self._state[MOVED])
        num_buckets = new
        if self._migrating:  # moved in hash order: pages behind the last moved bucket are untouched
            num_buckets = new * moved // old + old - moved
        rows = 4 * self.width * int(self._state[NEXT_ROW]) + 4 * int(self._state[NUM_FREE])
        return 8 * BUCKET * int(num_buckets) + rows + self.recent.num_bytes

    @property
    def num_free_rows(self) -> int:
        """How many more keys fit."""
        return self.max_rows - self.num_keys

    def reserve_for(self, keys: Keys) -> None:
        """Call `reserve` for the new keys among `keys`. Keys with rows never make a map grow, unless the map is so
        small that growing is cheaper than finding out which keys are new.
        """
        if self.num_keys + len(keys) < self._grows_at:
            return
        if self.recent.has(keys):
            return
        num_new = len(keys)
        if num_new > EASY_KEYS or int(self._num_buckets[NEW]) >= SMALL:
            num_new = self.find(keys, np.empty(num_new, np.int64), 0)
        self.reserve(min(num_new, self.num_free_rows))

    def settle(self) -> bool:
        """Move some more buckets while the server is idle. Returns False if there is nothing to move."""
        if not self._migrating:
            return False
        self._migrate(SETTLED_BUCKETS)
        return True

    def find(self, keys: Keys, rows: Rows, num_words: int) -> int:
        """rows[i] = row of keys[i], or -1; returns the number of missing keys. Prefetches the first `num_words` words
        behind each key into the cache for the caller's next read or write.
        """
        return int(key_search.find(*self._arrays, keys, rows, KEY_WORDS + num_words))

    def read(self, keys: Keys, rows: Rows, out: npt.NDArray[np.float32]) -> int:
        """As `find`, and out[i] = the first words behind the key of rows[i]; zeros for a missing key."""
        words, arrays = out.view(np.uint32), self._arrays

        def read(start: int, stop: int) -> int:
            return int(key_search.read(*arrays, keys[start:stop], rows[start:stop], KEY_WORDS, words[start:stop]))

        return sum(TEAM.share(read, len(keys), FEWEST_SHARED))

    def insert_missing(self, keys: Keys, rows: Rows) -> Rows:
        """Give rows to the keys that `find` missed. Returns the positions in `keys` of the new ones.

        The caller has checked `num_free_rows`, and has called `reserve` if an error at this point would be too late.
        """
        self.reserve(int((rows < 0).sum()))
        fresh = np.empty(len(keys), np.int64)
        num_fresh = int(hashmap.insert_missing(*self._arrays, self._free_rows, keys, rows, fresh))
        self.num_keys += num_fresh
        if self._migrating:
            self._migrate(MOVES_PER_KEY * num_fresh)
        return fresh[:num_fresh]

    def load(self, keys: Keys, rows: npt.NDArray[np.float32]) -> bool:
        """Load whole rows in one pass. Returns False, with no row changed, while the map grows or has freed rows."""
        self.reserve(len(keys))
        if self._migrating or self._state[NUM_FREE]:
            return False
        arrays = self._slots[NEW], self._num_buckets, self._state, self.words
        self.num_keys += int(hashmap.load(*arrays, keys, rows.view(np.uint32)))
        return True

    def erase(self, keys: Keys) -> int:
        """Remove keys; returns how many were present. Their rows are reused before new ones are allocated."""
        self.recent.forget()
        num_erased = int(hashmap.erase(*self._arrays, self._free_rows, keys))
        self.num_keys -= num_erased
        return num_erased

    def alive(self, rows: Rows) -> tuple[Keys, Rows]:
        """Keys and row numbers of those `rows` that are in use."""
        keys = self.keys_of(rows)
        if not self._state[NUM_FREE]:
            return keys, rows
        found = np.empty_like(rows)  # a freed row still holds its last key, but that key no longer maps to it
        self.find(keys, found, 0)
        return keys[found == rows], rows[found == rows]

    def keys_of(self, rows: Rows) -> Keys:
        """The keys in these rows, which must ascend; for a freed row, its last key."""
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows):  # contiguous: a slice is a plain copy
            words = np.ascontiguousarray(self.words[rows[0] : rows[-1] + 1, :KEY_WORDS])
        else:
            words = np.empty((len(rows), KEY_WORDS), np.float32)
            gather(self.store, self.width, 0, rows, words)
        return words.view(np.uint64).reshape(-1)

    @property
    def num_row_numbers(self) -> int:
        """All row numbers ever allocated are below this."""
        return int(self._state[NEXT_ROW])

    @property
    def _migrating(self) -> bool:
        return int(self._num_buckets[OLD]) > 1

    def reserve(self, num: int) -> None:
        """Make room for `num` new keys; starts growing the map if needed. Raises TableError with nothing changed."""
        if self.num_keys + num >= self._grows_at:
            needed = int((self.num_keys + num) / (MAX_LOAD * BUCKET)) + 1
            self._finish_migration()
            current = int(self._num_buckets[NEW])
            self._open(max(needed, int(current * (2 if current < SMALL else GROWTH))))
            if current < SMALL:
                self._finish_migration()

    def reserve_at_once(self, num: int) -> None:
        """As `reserve`, and moves all buckets before it returns."""
        self.reserve(num)
        self._finish_migration()

    def _open(self, num_buckets: int) -> None:
        """Start growing: the current slots become the old ones, and an empty array receives the moved buckets.

        There is a spare bucket for each home, and a home holds less than eight keys on average: all keys fit behind the
        last home. Spare buckets that no key needs are address space only.
        """
        num_slots = BUCKET * (2 * num_buckets + SPARE_BUCKETS)
        memory = Memory(8 * num_slots)
        if self._slots[NEW].size:
            self._slots[OLD], self._slots_memory[OLD] = self._slots[NEW], self._slots_memory[NEW]
            self._num_buckets[OLD] = self._num_buckets[NEW]
            self._state[MOVED] = 0
        self._slots[NEW] = memory.array(np.uint64)[:num_slots]
        self._slots_memory[NEW] = memory
        self._num_buckets[NEW] = num_buckets
        self._grows_at = int(num_buckets * MAX_LOAD * BUCKET)
        self._note_arrays()

    def _note_arrays(self) -> None:
        self._arrays = self._slots[OLD], self._slots[NEW], self._num_buckets, self._state, self.words

    def _migrate(self, num_buckets: int) -> None:
        moved = int(hashmap.migrate(self._slots[OLD], self._slots[NEW], self._num_buckets, self._state, num_buckets))
        self._slots_memory[OLD].release_up_to(8 * BUCKET * moved)
        if moved >= int(self._num_buckets[OLD]):
            self._close_old()

    def _finish_migration(self) -> None:
        if self._migrating:
            self._migrate(int(self._num_buckets[OLD]))
        else:
            self._close_old()

    def _close_old(self) -> None:
        """Leave no old slots: one bucket marked as moved, so that every key is looked up in the new ones."""
        self._slots[OLD], self._slots_memory[OLD] = np.zeros(2 * BUCKET, np.uint64), Memory(0)
        self._num_buckets[OLD] = 1
        self._state[MOVED] = 1
        self._note_arrays()
