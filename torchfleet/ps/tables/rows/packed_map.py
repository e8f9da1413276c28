"""A growing map with narrow rows inside it: the numba kernels of kernels/packed_buckets.py and their memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import packed_buckets, packed_moves
from torchfleet.ps.kernels.hashing import new_secret
from torchfleet.ps.kernels.packed_buckets import BUCKET, NEW, OLD, SECRET, UNMOVED
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, Keys, Rows
from torchfleet.ps.tables.rows.memory import Memory

MEMORY = 1.215  # most memory of a large map, as a multiple of the bytes of its rows; tags and marks included
PEAK_LOAD = 0.955  # load of the buckets that a growth moves last; lookups slow down above it
SLACK = 1.25  # keys until the next growth, as a multiple of the keys that a growth takes
FIRST_BUCKETS = 32
SMALL = 1 << 11  # buckets; a smaller map doubles, and grows at once (under a millisecond)
LIFTED_BUCKETS = 1 << 13  # many times the longest run of full buckets that occurs by chance
SETTLED_BUCKETS = 1 << 9  # buckets moved per idle call: a fraction of a millisecond
FEWEST_WALKED = 256  # least room of a step of a walk, on average half used: less would show the order of hashes
_HASH_BITS = 64


class Pace:
    """How a map with rows of `width` words grows: in small steps, so that its load stays high."""

    def __init__(self, width: int) -> None:
        num_bytes = 4 * width + 1 + 4 / BUCKET  # a row, its tag and its marks
        least_load = num_bytes / (4 * width * MEMORY)
        self.growth = PEAK_LOAD / least_load - 1  # share of its buckets by which the map grows
        self.max_load = PEAK_LOAD / (1 + self.growth / SLACK)  # load at which a growth starts
        self.moves_per_key = SLACK / (BUCKET * self.max_load * self.growth)  # buckets moved per new key during a growth

    def num_buckets(self, num_keys: int) -> int:
        """Buckets for `num_keys` keys."""
        return int(num_keys / (self.max_load * BUCKET)) + 1

    def num_moves(self, num_keys: int) -> int:
        """Buckets to move for `num_keys` new keys."""
        return int(num_keys * self.moves_per_key) + 1


class PackedMap:
    """The contract of KeyMap, except that row numbers are valid only until keys are inserted or erased.

    The row numbers that `insert_missing` fills in are all valid when it returns.
    """

    offset = KEY_WORDS

    def __init__(self, num_words: int, max_bytes: int) -> None:
        self.width = KEY_WORDS + num_words
        self.max_rows = min(max_bytes // (4 * self.width), (1 << 32) - 2)
        if self.max_rows < 1:
            raise TableError(f"a row takes {4 * self.width:,} bytes, but max_table_bytes is {max_bytes:,}")
        self._pace = Pace(self.width)
        self._max_buckets = max(self._pace.num_buckets(self.max_rows), FIRST_BUCKETS)
        # with room for all keys behind the last home; places that no key needs are address space only
        num_places = (self._max_buckets + -(-self.max_rows // BUCKET) + 1) * BUCKET
        self._memory = Memory(4 * self.width * num_places)
        self.store: npt.NDArray[np.float32] = self._memory.array(np.float32)
        words = self.store.view(np.uint32)[: num_places * self.width]
        self._words: npt.NDArray[np.uint32] = words.reshape(num_places, self.width)
        self._tags: npt.NDArray[np.uint64] = Memory(num_places).array(np.uint64)
        self._marks: npt.NDArray[np.uint32] = Memory(4 * (num_places // BUCKET)).array(np.uint32)
        self._lifted, self._kept = self._lifting_buffers(LIFTED_BUCKETS * BUCKET)
        self._state = np.concatenate([np.zeros(SECRET, np.int64), new_secret()])
        self._walk_secret = secrets.randbits(_HASH_BITS)
        self._num_buckets = np.full(2, FIRST_BUCKETS, np.uint64)
        self._bucket_bytes = 4 * self.width * BUCKET
        self._released = 0  # during a growth: from this byte on, rows that have moved away have no memory any more
        self._has_marks = False
        self.num_keys = 0
        self._arrays = self._tags, self._words, self._num_buckets, self._state  # in the order of the kernels' arguments

    @property
    def load_factor(self) -> float:
        return self.num_keys / (int(self._num_buckets[NEW]) * BUCKET)

    @property
    def num_bytes(self) -> int:
        """Bytes in use: rows, their tags, and their marks if saves are made."""
        old, new = self._num_buckets.tolist()
        # rows that have not moved take no additional memory yet
        num_buckets = new - (new - old) * int(self._state[UNMOVED]) // old
        return int(num_buckets) * (BUCKET * (4 * self.width + 1) + 4 * self._has_marks)

    @property
    def num_free_rows(self) -> int:
        """How many more keys fit."""
        return self.max_rows - self.num_keys

    def reserve_for(self, keys: Keys) -> None:
        """As KeyMap.reserve_for. Does nothing: the address space is reserved, so growth cannot fail and waits for new
        keys.
        """

    def settle(self) -> bool:
        """Move some more rows while the server is idle. Returns False if there is nothing to move."""
        if not self._migrating:
            return False
        self._migrate(SETTLED_BUCKETS)
        return True

    def find(self, keys: Keys, rows: Rows, num_words: int) -> int:
        """rows[i] = row of keys[i], or -1; returns the number of missing keys. Prefetches the first `num_words` words
        behind each key into the cache for the caller's next read or write.
        """
        return int(packed_buckets.find(*self._arrays, keys, rows, KEY_WORDS + num_words))

    def insert_missing(self, keys: Keys, rows: Rows) -> Rows:
        """Give rows to the keys that `find` missed. Returns the positions in `keys` of the new ones.

        The caller has checked `num_free_rows`, and has called `reserve` if an error at this point would be too late.
        """
        num_missing = int((rows < 0).sum())
        self.reserve(num_missing)
        # first, so that inserted rows do not move before they are used
        self._migrate(self._pace.num_moves(num_missing))
        fresh = np.empty(len(keys), np.int64)
        num_fresh = int(packed_buckets.insert_missing(*self._arrays, keys, rows, fresh))
        self.num_keys += num_fresh
        return fresh[:num_fresh]

    def load(self, keys: Keys, rows: npt.NDArray[np.float32]) -> bool:
        """As KeyMap.load. Always True."""
        self.reserve(len(keys))
        self._migrate(self._pace.num_moves(len(keys)))
        self.num_keys += int(packed_buckets.load(*self._arrays, keys, rows.view(np.uint32)))
        return True

    def erase(self, keys: Keys) -> int:
        """Remove keys; returns how many were present. Other rows may move to fill the gaps."""
        num_erased = int(packed_moves.erase(*self._arrays_with_marks(), keys))
        self.num_keys -= num_erased
        return num_erased

    def alive(self, rows: Rows) -> tuple[Keys, Rows]:
        """Keys and row numbers of those `rows` that are in use."""
        rows = rows[self._tags.view(np.uint8)[rows] != 0]
        return np.ascontiguousarray(self._words[rows, :KEY_WORDS]).view(np.uint64).reshape(-1), rows

    def slices(self, num_rows: int, only_marked: bool) -> Iterator[Rows]:
        """Yield the rows in use, at most `num_rows` at a time. `only_marked`: only those that the current save must
        write.

        Keys may be inserted and erased between two slices. A key that is present throughout comes exactly once: a slice
        has the keys of one block of hashes, which no growth changes.
        """
        position = 0
        while position < 1 << _HASH_BITS:
            rows, position = self._block_from(position, num_rows, 0, only_marked)
            yield rows

    def walk_from(self, cursor: int, num_rows: int) -> tuple[Keys, Rows, int]:
        """(keys in ascending order, their rows, the next cursor; 0 behind the last). For walks of clients: a step has
        at most `num_rows` rows, or about half of FEWEST_WALKED if that is more, whatever the cursor is. So a client
        learns of the order of hashes only which hundred keys lie together.
        """
        least = self._block_bits(FEWEST_WALKED // 2)
        found, cursor = self._block_from(cursor >> least << least, max(num_rows, FEWEST_WALKED), least, False)
        keys, rows = self.alive(found)
        order = np.argsort(keys)
        return keys[order], rows[order], cursor % (1 << _HASH_BITS)

    def _block_bits(self, num_rows: int) -> int:
        """The bits of the largest block of hashes, a power of two, that has at most `num_rows` places on average."""
        num_hashes = (num_rows << _HASH_BITS) // (int(self._num_buckets[NEW]) * BUCKET)
        return min(max(num_hashes, 1).bit_length() - 1, _HASH_BITS)

    def _block_from(self, position: int, num_rows: int, least: int, only_marked: bool) -> tuple[Rows, int]:
        """(the rows of one block of hashes; the position behind it). Blocks follow each other in the order of the hash
        with some bits flipped, by a secret only for this. A block with more than `num_rows` rows is halved, down to
        `least` bits; a block of `least` bits may have more rows.
        """
        bits = self._block_bits(num_rows)
        if position:
            bits = min(bits, (position & -position).bit_length() - 1)
        rows = np.empty(num_rows, np.int64)
        while True:
            first = (position ^ self._walk_secret) >> bits << bits
            arguments = np.uint64(first), np.uint64(first + (1 << bits) - 1), only_marked, rows
            num = int(packed_moves.collect(*self._arrays_with_marks(), *arguments))
            if num != packed_moves.CROWDED:
                return rows[:num], position + (1 << bits)
            if bits > least:
                bits -= 1
            else:
                rows = np.empty(2 * len(rows), np.int64)

    def mark(self, rows: Rows) -> None:
        """Mark rows that changed since the last save began. Negative numbers are ignored."""
        self._has_marks = True
        packed_moves.mark(self._marks, rows)

    def begin_save(self, keeps_last: bool) -> None:
        """Hand the marks over to the save that begins. `keeps_last`: add them to the marks of the previous save."""
        packed_moves.begin_save(self._tags, self._marks, self._num_buckets[NEW], keeps_last)

    def reserve(self, num: int) -> None:
        """Make room for `num` new keys; starts growing the map if needed."""
        needed = self._pace.num_buckets(self.num_keys + num)
        current = int(self._num_buckets[NEW])
        if needed > current:
            self._finish_migration()
            larger = current + int(current * (1 if current < SMALL else self._pace.growth))
            self._num_buckets[OLD] = self._state[UNMOVED] = current
            self._released = current * self._bucket_bytes
            self._num_buckets[NEW] = min(max(needed, larger), self._max_buckets)
            if current < SMALL:
                self._finish_migration()

    def reserve_at_once(self, num: int) -> None:
        """As `reserve`, and moves every row before it returns."""
        self.reserve(num)
        self._finish_migration()

    @property
    def _migrating(self) -> bool:
        return int(self._state[UNMOVED]) > 0

    def _arrays_with_marks(self) -> tuple[Any, ...]:
        return self._tags, self._marks, self._words, self._num_buckets, self._state

    def _migrate(self, num_buckets: int) -> None:
        if not self._migrating:
            return
        target = max(int(self._state[UNMOVED]) - num_buckets, 0)
        while self._migrating and int(self._state[UNMOVED]) > target:
            num = int(self._state[UNMOVED]) - target
            if packed_moves.migrate(*self._arrays_with_marks(), self._lifted, self._kept, num) == packed_moves.TOO_LONG:
                self._lifted, self._kept = self._lifting_buffers(2 * len(self._kept))
        self._release_gap()

    def _release_gap(self) -> None:
        """Release the memory between the remaining old homes and the first new home, where nothing is stored."""
        (old, new), unmoved = self._num_buckets.tolist(), int(self._state[UNMOVED])
        first_new = (-(-(unmoved << 32) // old) * new) >> 32
        stop = min(first_new * self._bucket_bytes, self._released)
        self._released = self._memory.release(unmoved * self._bucket_bytes, stop)

    def _finish_migration(self) -> None:
        self._migrate(int(self._state[UNMOVED]))

    def _lifting_buffers(self, num_rows: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """(words, marks) of `num_rows` rows on their way to new homes."""
        words = Memory(4 * self.width * num_rows).array(np.uint32)[: num_rows * self.width]
        return words.reshape(num_rows, self.width), Memory(4 * num_rows).array(np.uint32)[:num_rows]
