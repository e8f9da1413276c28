"""Rows on disk: appended in blocks, read one page at a time, compacted when many of them have moved away.

The file has no name: it is gone when the server ends, however it ends, and no other process opens it. Rows are restored
from saves and logs, as those of tables in memory. It consists of segments. Records are appended to one segment after
the other; a segment whose rows have all moved away is written again.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.tiers.disk import Disk, open_disk
from torchfleet.ps.tables.tiers.pages import Layout, Words

Slots = npt.NDArray[np.int64]  # numbers of records in the file
SEGMENT_BYTES = 64 << 20
MOST_UNWRITTEN = 64  # blocks that may wait for the disk
SCAN_BLOCKS = 8  # blocks read at once by a scan
MOST_LIVE = 0.9  # share of a segment's records in use above which it is not worth moving them


class ColdRows:
    """Records of one table in a file below `folder`. Owned by one thread."""

    def __init__(self, row_words: int, folder: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.layout = Layout(row_words)
        self.folder = folder
        self._file, self.is_direct = _open(folder)
        self._disk = open_disk(self._file)
        self._closing = weakref.finalize(self, _close, self._disk, self._file)
        self._blocks_per_segment = max(1, segment_bytes // self.layout.block_bytes)
        self.per_segment = self._blocks_per_segment * self.layout.per_block
        self._numbers = np.empty(0, np.int64)  # by block of the file: the number of its first page, which only grows
        self._changed = np.empty(0, np.int64)  # by block of the file: the largest save number in its records
        self.live = np.empty(0, np.int64)  # by segment: records that are in use
        self._is_in_use = np.empty(0, np.bool_)  # by segment
        self._free: list[int] = []
        self._next_number = 1  # of a page
        self._unwritten: dict[int, Words] = {}  # by block of the file
        self._failed: dict[int, int] = {}  # by block of the file that could not be written: why
        self._spare: list[Words] = []  # blocks to fill again
        self._block = -1  # that is being filled
        self._filled = 0  # records in it
        self._segment_end = -1
        self.num_live = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.live) * self._blocks_per_segment * self.layout.block_bytes

    def reserve(self, num: int) -> None:
        """Make sure that `num` records can be appended. Raises TableError, which names the folder, if the disk is full
        or has failed.
        """
        self._end_writes(0)
        if self._failed:
            self._write_again()
        room = 0 if self._block < 0 else (self._segment_end - self._block) * self.layout.per_block - self._filled
        room += len(self._free) * self.per_segment
        while room < num:
            self._extend()
            room += self.per_segment

    def _extend(self) -> None:
        size = self._blocks_per_segment * self.layout.block_bytes
        try:
            _allocate(self._file, len(self.live) * size, size)
        except OSError as error:
            raise self._error(error.errno or errno.EIO, "cannot be made larger") from None
        self._free.append(len(self.live))
        self._numbers = np.append(self._numbers, np.zeros(self._blocks_per_segment, np.int64))
        self._changed = np.append(self._changed, np.zeros(self._blocks_per_segment, np.int64))
        self.live, self._is_in_use = np.append(self.live, 0), np.append(self._is_in_use, False)

    def append(self, records: Words, changed: int) -> Slots:
        """Append records for which there is room. `changed`: the largest save number in them."""
        slots, done = np.empty(len(records), np.int64), 0
        while done < len(records):
            if self._block < 0 or self._filled == self.layout.per_block:
                self._next_block()
            num = min(len(records) - done, self.layout.per_block - self._filled)
            self.layout.fill(self._unwritten[self._block], self._filled, records[done : done + num])
            slots[done : done + num] = np.arange(num) + self._block * self.layout.per_block + self._filled
            self.live[self._block // self._blocks_per_segment] += num
            self._changed[self._block] = max(int(self._changed[self._block]), changed)
            self._filled += num
            done += num
        self.num_live += len(records)
        return slots

    def _next_block(self) -> None:
        """Begin to write the block that is full, and begin another."""
        self.flush()
        if self._block < 0 or self._block + 1 == self._segment_end:
            segment = self._free.pop(0)
            self._block = segment * self._blocks_per_segment
            self._segment_end = self._block + self._blocks_per_segment
            self._is_in_use[segment] = True
        else:
            self._block += 1
        self._filled = self._changed[self._block] = 0
        self._numbers[self._block] = self._next_number
        self._next_number += self.layout.pages_per_block
        self._unwritten[self._block] = self._spare.pop() if self._spare else self._new_block()

    def _new_block(self) -> Words:
        return np.frombuffer(mmap.mmap(-1, self.layout.block_bytes), np.uint32)  # at the start of a page, for O_DIRECT

    def flush(self) -> None:
        """Begin to write the block that is full."""
        if self._block >= 0 and self._filled == self.layout.per_block:
            words = self._unwritten[self._block]
            self.layout.seal(words, int(self._numbers[self._block]))
            self._disk.begin_write(self._block, self._block * self.layout.block_bytes, words.view(np.uint8))
            self._end_writes(max(0, len(self._unwritten) - len(self._failed) - MOST_UNWRITTEN))

    def _end_writes(self, fewest: int) -> None:
        """Let go of blocks that are on disk. A block that could not be written stays in memory, until `reserve`."""
        for block, result in self._disk.end_writes(fewest):
            if result != self.layout.block_bytes:
                self._failed[block] = -result if result < 0 else errno.EIO
                continue
            self._spare.append(self._unwritten.pop(block))
            self._free_if_empty(block // self._blocks_per_segment)

    def _write_again(self) -> None:
        """Write the blocks that could not be written. Raises TableError if one of them still cannot be."""
        failed, self._failed = self._failed, {}
        for block in failed:
            self._disk.begin_write(block, block * self.layout.block_bytes, self._unwritten[block].view(np.uint8))
        self._end_writes(len(failed))
        if self._failed:
            raise self._error(next(iter(self._failed.values())), "cannot be written")

    def read(self, slots: Slots) -> Words:
        """The records in these slots. Raises TableError if the disk does not return what was written."""
        page_of, slot_of = np.divmod(slots, self.layout.per_page)
        blocks = page_of // self.layout.pages_per_block
        in_memory = np.isin(blocks, list(self._unwritten))
        out = np.empty((len(slots), self.layout.record_words), np.uint32)
        for block in np.unique(blocks[in_memory]).tolist():
            own = np.flatnonzero(in_memory & (blocks == block))
            pages = page_of[own] - block * self.layout.pages_per_block
            out[own] = self.layout.take(self._unwritten[block], pages, slot_of[own])
        rest = np.flatnonzero(~in_memory)
        if len(rest):
            pages, inverse = np.unique(page_of[rest], return_inverse=True)
            out[rest] = self.layout.take(self._read_pages(pages), inverse, slot_of[rest])
        return out

    def _read_pages(self, pages: npt.NDArray[np.int64]) -> Words:
        size = self.layout.page_bytes
        memory = np.frombuffer(mmap.mmap(-1, len(pages) * size), np.uint8).reshape(len(pages), size)
        self._expect(self._disk.read(pages * size, memory), size)
        blocks, rest = np.divmod(pages, self.layout.pages_per_block)
        self.layout.check(memory.view(np.uint32), self._numbers[blocks] + rest, self.folder)
        return memory.view(np.uint32)

    def release(self, slots: Slots) -> None:
        """The rows of these slots are elsewhere now."""
        counts = np.bincount(slots // self.per_segment, minlength=len(self.live))
        self.live -= counts
        self.num_live -= len(slots)
        for segment in np.flatnonzero((counts > 0) & (self.live == 0)).tolist():
            self._free_if_empty(segment)

    def _free_if_empty(self, segment: int) -> None:
        """Let a segment be written again, unless some of its blocks are in use, or wait for the disk."""
        first = segment * self._blocks_per_segment
        blocks = range(first, first + self._blocks_per_segment)
        if self.live[segment] == 0 and self._is_in_use[segment] and not any(b in self._unwritten for b in blocks):
            self._free.append(segment)
            self._is_in_use[segment] = False
            self._numbers[first : first + self._blocks_per_segment] = 0

    def ordinals(self, slots: Slots) -> npt.NDArray[np.int64]:
        """The order in which the records in these slots were appended: a later one has a higher number."""
        pages, rest = np.divmod(slots, self.layout.per_page)
        blocks, page = np.divmod(pages, self.layout.pages_per_block)
        return (self._numbers[blocks] + page) * self.layout.per_page + rest

    @property
    def next_ordinal(self) -> int:
        """Of the next record."""
        if self._block < 0 or self._filled == self.layout.per_block:
            return self._next_number * self.layout.per_page
        return int(self._numbers[self._block]) * self.layout.per_page + self._filled

    def scan(self, start: int, since: int = 0) -> tuple[Slots, Words, int]:
        """(slots, records, the ordinal after the last) of some records from the ordinal `start` on, in order, those
        included whose rows have moved away. Blocks whose records changed last before save `since` are left out. Without
        any the result is empty, and its last part `next_ordinal`.
        """
        layout = self.layout
        ends = (self._numbers + layout.pages_per_block) * layout.per_page
        if self._block >= 0:
            ends[self._block] = self._numbers[self._block] * layout.per_page + self._filled
        wanted = np.flatnonzero((self._numbers > 0) & (ends > start) & (self._changed >= since))
        chosen = wanted[np.argsort(self._numbers[wanted], kind="stable")][:SCAN_BLOCKS]
        if not len(chosen):
            return np.empty(0, np.int64), np.empty((0, layout.record_words), np.uint32), self.next_ordinal
        num_filled = np.where(chosen == self._block, self._filled, layout.per_block)
        words = self._read_blocks(chosen)
        slots = np.concatenate([b * layout.per_block + np.arange(n) for b, n in zip(chosen, num_filled, strict=True)])
        places = np.concatenate([i * layout.per_block + np.arange(n) for i, n in enumerate(num_filled)])
        is_new = self.ordinals(slots) >= start
        pages, rest = np.divmod(places[is_new], layout.per_page)
        return slots[is_new], layout.take(words, pages, rest), int(ends[chosen[-1]])

    def has(self, block: int) -> bool:
        """Whether a block is full and in use."""
        return bool(self._numbers[block]) and block != self._block

    def scan_block(self, block: int) -> tuple[Slots, Words]:
        """(slots, records) of one block, those included whose rows have moved away."""
        pages, rest = np.divmod(np.arange(self.layout.per_block), self.layout.per_page)
        words = self._read_blocks(np.array([block]))
        return block * self.layout.per_block + np.arange(self.layout.per_block), self.layout.take(words, pages, rest)

    def sparsest(self) -> range | None:
        """The blocks of the segment with the fewest rows in use; None if all segments are nearly full."""
        candidates = np.flatnonzero(self._is_in_use)
        current = self._block // self._blocks_per_segment
        candidates = candidates[candidates != current]
        if not len(candidates):
            return None
        segment = int(candidates[np.argmin(self.live[candidates])])
        if self.live[segment] > MOST_LIVE * self.per_segment:
            return None
        return range(segment * self._blocks_per_segment, (segment + 1) * self._blocks_per_segment)

    @property
    def waste(self) -> float:
        """The share of the records of all segments in use whose rows have moved away."""
        return 1 - self.num_live / max(1, int(self._is_in_use.sum()) * self.per_segment)

    def _read_blocks(self, blocks: npt.NDArray[np.int64]) -> Words:
        size = self.layout.block_bytes
        memory = np.frombuffer(mmap.mmap(-1, len(blocks) * size), np.uint8).reshape(-1, size)
        on_disk = np.array([block not in self._unwritten for block in blocks.tolist()])
        blocks, num = np.concatenate([blocks[on_disk], blocks[~on_disk]]), int(on_disk.sum())
        if num:
            self._expect(self._disk.read(blocks[:num] * size, memory[:num]), size)
            numbers = self._numbers[blocks[:num], None] + np.arange(self.layout.pages_per_block)
            self.layout.check(memory[:num].view(np.uint32), numbers.reshape(-1), self.folder)
        for i in range(num, len(blocks)):  # writes end in any order
            memory[i] = self._unwritten[int(blocks[i])].view(np.uint8)
        if 0 < num < len(blocks):
            memory = memory[np.argsort(np.concatenate([np.flatnonzero(on_disk), np.flatnonzero(~on_disk)]))]
        return memory.reshape(-1).view(np.uint32)

    def close(self) -> None:
        """Let go of the file, which the system then removes. Also done when nothing refers to this object."""
        self._closing()

    def _expect(self, results: npt.NDArray[np.int64], size: int) -> None:
        wrong = results[results != size]
        if len(wrong):
            raise self._error(-int(wrong[0]) if wrong[0] < 0 else errno.EIO, "cannot be read")

    def _error(self, number: int, what: str) -> TableError:
        return TableError(
            f"the file of cold rows in {self.folder} ({self.num_bytes:,} bytes) {what}: {os.strerror(number)}. "
            "Rows that are in memory can still be used; free some space there, or use a larger disk."
        )


def _open(folder: str) -> tuple[int, bool]:
    """(a new file without a name, whether it is read and written past the page cache)."""
    try:
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), False
    except OSError as error:
        raise TableError(
            f"cannot make a file for cold rows in {folder}: {os.strerror(error.errno or errno.EIO)}. Expected a folder "
            "that exists, to which this user can write, on a local disk."
        ) from None


def _close(disk: Disk, file: int) -> None:
    with contextlib.suppress(OSError):
        disk.close()
    os.close(file)


def _allocate(file: int, start: int, size: int) -> None:
    try:
        os.posix_fallocate(file, start, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(file, start + size)
