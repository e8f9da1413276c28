"""Where the rows of a table on two tiers are: those used last in memory, all others on disk.

Before a request touches rows, `bring` reads those that are on disk, all at once, and `_make_room` writes as many of the
rows that were not used for the longest time. A row is in one place only, so a row is written each time it leaves
memory: nearly all rows that training reads, it changes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import rows as row_kernels
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.kernels.statistics import NEVER, oldest
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, KeyMap, Keys, Rows
from torchfleet.ps.tables.rows.memory import Memory
from torchfleet.ps.tables.tiers.cold_rows import ColdRows
from torchfleet.ps.tables.tiers.directory import Directory, Places
from torchfleet.ps.tables.tiers.found_rows import FoundRows
from torchfleet.ps.tables.tiers.pages import RECORD_HEAD, Slots, Words, keys_of
from torchfleet.ps.tables.tiers.passes import Pass, Passes
from torchfleet.ps.tables.tiers.scan import Scan

CHUNK = 2048  # keys per call of the map
HOT_BYTES = 18 + 12  # per row in memory, beside the row: map slots, the list of free rows; used, changed, bits
BUFFER_BYTES = 32 << 20  # blocks on their way to the disk, and what is read at once
FEWEST_ROWS = 4096  # that memory must have room for
SWEEP = 8192  # rows that leave memory at once
SAMPLE = 1 << 14  # rows whose last use is looked at to tell which rows are old
SHARE = 0.1  # of the rows, the oldest, may leave in one lap
IDLE_WASTE, MOST_WASTE = 0.25, 0.5  # share of dead records above which the file is compacted: while idle, and always
WALKED = 1024  # rows of a walk at once: each is a read of the disk
CLEARED = 1 << 20  # rows in memory that a pass prepares at once
MAX_TICK = 1 << 31


class Tiers:
    """The tiers of one table; `index` has the rows in memory."""

    def __init__(self, name: str, index: KeyMap, memory: int, cold: ColdRows) -> None:
        self._name, self._index, self._memory = name, index, memory
        self.cold = cold
        self.directory = Directory(memory // 9, index.max_rows)
        self._used: npt.NDArray[np.uint32] = Memory(4 * index.max_rows).array(np.uint32)  # NEVER: not in use
        self._changed: npt.NDArray[np.uint32] = Memory(4 * index.max_rows).array(np.uint32)
        self._found = FoundRows(index, self._used)
        self._passes = Passes(index.max_rows, Memory(4 * index.max_rows).array(np.uint32))
        self.interval = 1  # between two saves: the number that rows that change now get
        self._tick = 1
        self._hand = self._cut = 0
        self._compacted: Iterator[int] = iter(())  # the blocks still to be moved of one segment
        self.num_read = self.num_written = 0  # rows

    @property
    def max_hot(self) -> int:
        """How many rows may be in memory, beside the directory of all rows."""
        free = self._memory - self.directory.num_bytes - BUFFER_BYTES
        return min(free // (4 * self._index.width + HOT_BYTES), self._index.max_rows)

    @property
    def num_bytes(self) -> int:
        """Memory in use, except buffers."""
        return self._index.num_bytes + self.directory.num_bytes + 12 * self._index.num_row_numbers

    def check_batch(self, keys: Keys) -> None:
        """Raise TableError if the rows of these keys cannot be in memory together, or cannot be made to fit."""
        num, free = len(keys), self.directory.max_keys - self.directory.num_keys
        if num > min(self.max_hot, free) and (num := len(unique(keys)[0])) > self.max_hot:
            raise TableError(
                f"table '{self._name}': one request needs {num:,} rows, and memory holds {self.max_hot:,} of its "
                f"{self.directory.num_keys:,} rows beside their directory. Give it more memory, or smaller batches."
            )
        if num > free:
            raise TableError(
                f"table '{self._name}' has {self.directory.num_keys:,} rows, and its memory of {self._memory:,} bytes "
                f"holds a directory of {self.directory.max_keys:,}. Give it more memory, or use more servers."
            )
        self.cold.reserve(num + SWEEP)

    def foresee(self, keys: Keys) -> None:
        """Begin to read the rows of these keys, which a request that waits will need, from the disk."""
        at = self._find(keys, 0)
        self._found.note(keys, at)
        missing = keys[at < 0]
        places = self.directory.find_cold(missing, np.zeros(len(missing), np.int64))
        self.cold.foresee(places[places >= 0] - self._index.max_rows)

    def bring(self, keys: Keys, num_words: int = 0) -> Rows:
        """Bring the rows of these keys into memory, and make room for those that have none yet. Returns the row
        numbers; -1 for a key without a row.
        """
        self._tick += 1
        if self._tick == MAX_TICK:
            self._renumber()
        if self.cold.waste > MOST_WASTE:
            self.compact()
        at = self._found.rows_of(keys, self._tick, num_words)
        if at is not None and at.min() >= 0:
            return at
        at = self._hot(keys, at, num_words)
        missing = at < 0
        if missing.any():
            strangers, inverse = unique(keys[missing], many_repeat=False)
            places, records = self.look_up(strangers)
            here = places >= 0
            self._make_room(len(strangers))
            brought = np.full(len(strangers), -1, np.int64)
            brought[here] = self._insert(strangers[here], places[here], records)
            at[missing] = brought[inverse]
        self._found.note(keys, at, self._tick)
        return at

    def _hot(self, keys: Keys, known: Rows | None, num_words: int) -> Rows:
        """Row numbers of the keys whose rows are in memory, which are in use now; -1 for others. `known`: those that
        need no search, and -1.
        """
        at = np.full(len(keys), -1, np.int64) if known is None else known
        missing = np.flatnonzero(at < 0)
        at[missing] = found = self._find(keys[missing], num_words)
        self._use(found)
        return at

    def _use(self, at: Rows) -> None:
        self._used[at[at >= 0]] = self._tick

    def _find(self, keys: Keys, num_words: int) -> Rows:
        at = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), CHUNK):
            self._index.find(keys[start : start + CHUNK], at[start : start + CHUNK], num_words)
        return at

    def look_up(self, keys: Keys) -> tuple[Places, Words]:
        """(places of the keys whose rows are on disk, -1 for others; their records, in the order of the keys)."""
        out, found = np.full(len(keys), -1, np.int64), []
        skips, pending = np.zeros(len(keys), np.int64), np.arange(len(keys))
        while len(pending):
            places = self.directory.find_cold(keys[pending], skips[pending])
            pending, places = pending[places >= 0], places[places >= 0]
            if not len(pending):
                break
            records = self.cold.read(places - self._index.max_rows)
            same = keys_of(records) == keys[pending]
            if len(pending) == len(keys) and same.all():  # as nearly always
                return places, records
            out[pending[same]] = places[same]
            found.append((pending[same], records[same]))
            skips[pending[~same]] += 1  # another key with the same tag
            pending = pending[~same]
        order = np.argsort(np.concatenate([some for some, _ in found] or [np.empty(0, np.int64)]), kind="stable")
        empty = np.empty((0, self.cold.layout.record_words), np.uint32)
        return out, np.concatenate([some for _, some in found] or [empty])[order]

    def _insert(self, keys: Keys, places: Places, records: Words) -> Rows:
        """Move records into memory, where there is room for them. Returns their row numbers."""
        at = np.full(len(keys), -1, np.int64)
        if not len(keys):
            return at
        for start in range(0, len(keys), CHUNK):
            some = slice(start, start + CHUNK)
            self._index.insert_missing(keys[some], at[some])
        words = np.ascontiguousarray(records[:, RECORD_HEAD:]).view(np.float32)
        row_kernels.scatter(self._index.store, self._index.width, self._index.offset, at, words)
        slots = places - self._index.max_rows
        self._passes.brought(keys, at, self.cold.ordinals(slots), records[:, KEY_WORDS + 1])
        self._changed[at] = records[:, KEY_WORDS]
        self._use(at)
        self.directory.move(keys, places, at)
        self.cold.release(slots)
        self.num_read += len(keys)
        return at

    def note_new(self, keys: Keys, at: Rows) -> None:
        """These keys got rows in memory."""
        self.directory.insert(keys, at)
        self._passes.forget(at)
        self._use(at)
        self._changed[at] = 0

    def note_gone(self, keys: Keys, at: Rows) -> None:
        """The rows of these keys in memory are dropped."""
        self.directory.remove(keys, at)
        self._used[at] = NEVER
        self._found.forget()

    def add_cold(self, keys: Keys, words: Words) -> None:
        """New rows, straight to the disk: for loading more rows than memory holds."""
        self.cold.reserve(len(keys))
        records = self._records(keys, words, np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint32))
        self.directory.insert(keys, self.cold.append(records, 0) + self._index.max_rows)

    def mark(self, at: Rows) -> None:
        """These rows have changed; negative numbers are ignored."""
        self._changed[at[at >= 0]] = self.interval

    # Rows that leave memory

    def _make_room(self, num_new: int) -> None:
        excess = self._index.num_keys + num_new - self.max_hot
        if excess > 0:
            self._evict(min(excess + SWEEP, self._index.num_keys), excess)

    def _evict(self, wanted: int, needed: int) -> None:
        """Write `wanted` rows to the disk, but those of this request; at least `needed`."""
        self.cold.reserve(wanted)
        num_out, num_empty = 0, 0
        while num_out < wanted:
            if self._hand == 0:
                self._cut = self._tick - 1 if num_empty else self._old_tick()
                num_empty += 1
            num_rows = self._index.num_row_numbers
            found = np.empty(min(wanted - num_out, SWEEP), np.int64)
            cut = np.uint32(min(self._cut, self._tick - 1))
            num, stop = oldest(self._used, 1, 0, self._hand, num_rows, cut, len(found), found)
            self._hand = stop if stop < num_rows else 0
            if num:
                self._found.note_left(int(cut))
                self._write_out(found[:num])
                num_out, num_empty = num_out + num, 0
            elif num_empty > 2:  # only rows of this request are left
                break
        if num_out < needed:
            raise RuntimeError("a request needs more rows than memory holds. This is a bug.")

    def _old_tick(self) -> int:
        """The tick at or before which a tenth of the rows were used last."""
        num = self._index.num_row_numbers
        ticks = self._used[: num : max(1, num // SAMPLE)]
        ticks = ticks[ticks != NEVER]
        return int(np.partition(ticks, int(len(ticks) * SHARE))[int(len(ticks) * SHARE)]) if len(ticks) else 0

    def _write_out(self, at: Rows) -> None:
        keys = self._index.keys_of(at)
        changed = self._changed[at]
        records = self._records(keys, self._gather(at), changed, self._passes.bits_of(at))
        slots = self.cold.append(records, int(changed.max()))
        self.directory.move(keys, at, slots + self._index.max_rows)
        self._index.erase(keys)
        self._used[at] = NEVER
        self.num_written += len(at)

    @staticmethod
    def _records(keys: Keys, words: Words, changed: Words, bits: Words) -> Words:
        out = np.empty((len(keys), RECORD_HEAD + words.shape[1]), np.uint32)
        out[:, :KEY_WORDS] = keys.view(np.uint32).reshape(-1, KEY_WORDS)
        out[:, KEY_WORDS], out[:, KEY_WORDS + 1] = changed, bits
        out[:, RECORD_HEAD:] = words
        return out

    def _renumber(self) -> None:
        """Ticks start again at half of their range, before they would overflow."""
        used = self._used[: self._index.num_row_numbers]
        is_used = used != NEVER
        used[is_used] = np.maximum(used[is_used], MAX_TICK // 2) - (MAX_TICK // 2 - 1)
        self._tick -= MAX_TICK // 2 - 1
        self._hand = 0
        self._found.forget()

    # Compaction

    def settle(self) -> bool:
        """Move one block of rows while the server is idle. Returns False if there is none worth moving."""
        return self.cold.waste > IDLE_WASTE and self.compact()

    def compact(self) -> bool:
        """Move the rows of one block, of the segment with the fewest, to the end of the file. Returns False if there is
        none worth moving.
        """
        block = next(self._compacted, None)
        if block is None:
            self._compacted = iter(self.cold.sparsest() or ())
            block = next(self._compacted, None)
            if block is None:
                return False
        try:
            self.cold.reserve(self.cold.layout.per_block)
        except TableError:  # the disk is full: a request that needs room says so
            return False
        if not self.cold.has(block):  # looked at last: writes that have ended may have freed its segment
            return True
        slots, keys, records = self.cold.scan_block(block)
        self._move(keys, slots, records)
        return True

    def _move(self, keys: Keys, slots: Slots, records: Words) -> None:
        if not len(keys):
            return
        records[:, KEY_WORDS + 1] = self._passes.moved(keys, self.cold.ordinals(slots), records[:, KEY_WORDS + 1])
        new = self.cold.append(records, int(records[:, KEY_WORDS].max()))
        self.directory.move(keys, slots + self._index.max_rows, new + self._index.max_rows)
        self.cold.release(slots)

    # All rows

    def all_rows(self, num_rows: int, since: int, most_wait: float | None = None) -> Iterator[tuple[Keys, Words]]:
        """Yield (keys, words) of all rows that changed in interval `since` or later, in slices. `most_wait`: seconds
        after which a slice without rows comes if the disk is busy.
        """
        lane = self._passes.reserve()
        if lane is None:
            raise TableError(
                f"table '{self._name}' is being saved or read as a whole too many times at once; try later"
            )
        try:
            for start in range(0, self._index.num_row_numbers, CLEARED):
                self._passes.clear(lane, slice(start, start + CLEARED))
                if most_wait is not None:
                    yield np.empty(0, np.uint64), np.empty((0, self.cold.layout.row_words), np.uint32)
            one = self._passes.begin(lane, self.cold.next_ordinal)
            yield from self._scan(one, since, most_wait)
            yield from self._hot_rows(one, num_rows, since)
            one.until, one.is_last_scan = self.cold.next_ordinal, True
            yield from self._scan(one, since, most_wait)
            while one.late:
                keys = np.concatenate(one.late)
                one.late = [keys[num_rows:]] if len(keys) > num_rows else []
                yield self._read(keys[:num_rows])
        finally:
            self._passes.end(lane)

    def _scan(self, one: Pass, since: int, most_wait: float | None) -> Iterator[tuple[Keys, Words]]:
        with Scan(self.cold, since, one.begun_at, int(one.bit), most_wait) as scan:
            while one.cold < one.until:
                before = one.cold
                _, keys, words, one.cold = scan.take(before)
                if len(keys) or one.cold == before:
                    yield keys, words

    def _hot_rows(self, one: Pass, num_rows: int, since: int) -> Iterator[tuple[Keys, Words]]:
        while one.hot < self._index.num_row_numbers:
            stop = min(one.hot + num_rows, self._index.num_row_numbers)
            rows = np.arange(one.hot, stop)
            rows = rows[(self._used[one.hot : stop] != NEVER) & (self._changed[one.hot : stop] >= since)]
            rows = self._passes.take_hot(one, rows)
            one.hot = stop
            if len(rows):
                yield self._index.keys_of(rows), self._gather(rows)

    def _gather(self, rows: Rows) -> Words:
        words = np.empty((len(rows), self._index.width - KEY_WORDS), np.float32)
        row_kernels.gather(self._index.store, self._index.width, self._index.offset, rows, words)
        return words.view(np.uint32)

    def _read(self, keys: Keys) -> tuple[Keys, Words]:
        """The rows of these keys, wherever they are; keys without a row are left out."""
        at = self._find(keys, 0)
        places, records = self.look_up(keys[at < 0])
        there = np.flatnonzero(at < 0)[places >= 0]
        words = np.concatenate([self._gather(at[at >= 0]), records[:, RECORD_HEAD:]])
        return np.concatenate([keys[at >= 0], keys[there]]), words

    def walk(self, cursor: int, num_rows: int) -> tuple[Keys, Words, int]:
        """(keys, words, next cursor) of at most `num_rows` rows; 0 is the first and the last cursor. Each slice is
        sorted by place, so that it tells nothing of the hashes in it.
        """
        places, behind = self.directory.places_from(cursor, min(num_rows, WALKED))
        hot = np.sort(places[places < self._index.max_rows])
        records = self.cold.read(np.sort(places[places >= self._index.max_rows]) - self._index.max_rows)
        keys = np.concatenate([self._index.keys_of(hot), keys_of(records)])
        return keys, np.concatenate([self._gather(hot), records[:, RECORD_HEAD:]]), behind
