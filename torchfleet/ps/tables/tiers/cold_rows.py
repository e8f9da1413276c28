"""Rows on disk: appended in blocks, read one page at a time, compacted when many of them have moved away.

The file has no name: it is gone when the server ends, however it ends, and no other process opens it. Rows are restored
from saves and logs, as in tables in memory. The file consists of segments. Records are appended to one segment after
the other; a segment whose rows have all moved away is written again.
"""

from __future__ import annotations

import errno
import weakref
from functools import partial

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import pages as kernels
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.tiers.cold_file import (
    PageReader,
    Pages,
    Room,
    aligned,
    allocate,
    close_file,
    file_error,
    open_file,
)
from torchfleet.ps.tables.tiers.disk import open_disk
from torchfleet.ps.tables.tiers.pages import Layout, Slots, Words
from torchfleet.ps.tables.tiers.read_ahead import ReadAhead

SEGMENT_BYTES = 64 << 20
MOST_UNWRITTEN = 64  # blocks that may wait for the disk
PIECE = 1 << 12  # pages read at once
MOST_LIVE = 0.9  # share of a segment's records in use above which it is not worth moving them


class ColdRows:
    """Records of one table in a file below `folder`. Owned by one thread."""

    def __init__(self, row_words: int, folder: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.layout = Layout(row_words)
        self.folder = folder
        self._file, self.is_direct = open_file(folder)
        self.make_reader = partial(PageReader, self._file, self.layout, folder)
        self._disk, self._reader = open_disk(self._file), self.make_reader()
        self._ahead = ReadAhead(self.layout.page_bytes, self.make_reader)
        self._closing = weakref.finalize(self, close_file, self._file, self._ahead, self._reader, self._disk)
        self._room = Room()  # memory to read into
        self._blocks_per_segment = max(1, segment_bytes // self.layout.block_bytes)
        self.per_segment = self._blocks_per_segment * self.layout.per_block
        self._numbers = np.empty(0, np.int64)  # by block of the file: the number of its first page, which only grows
        self._changed = np.empty(0, np.int64)  # by block of the file: the largest save number in its records
        self._is_unwritten = np.empty(0, np.bool_)  # by block of the file: whether it is in _unwritten
        self._used = np.empty(0, np.uint8)  # a bit for every record: whether it is in use
        self.live = np.empty(0, np.int64)  # by segment: records that are in use
        self._is_in_use = np.empty(0, np.bool_)  # by segment
        self._free: list[int] = []
        self._next_number = 1  # of a page
        self._unwritten: dict[int, Words] = {}  # by block of the file
        self._failed: dict[int, int] = {}  # by block of the file that could not be written: the errno
        self._spare: list[Words] = []  # blocks to fill again
        self._block = -1  # the one that is being filled
        self._filled = 0  # records in this block
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
            allocate(self._file, len(self.live) * size, size)
        except OSError as error:
            raise file_error(self.folder, "cannot be made larger", error.errno or errno.EIO) from None
        self._free.append(len(self.live))
        more = np.zeros(self._blocks_per_segment, np.int64)
        self._numbers, self._changed = np.append(self._numbers, more), np.append(self._changed, more)
        self._is_unwritten = np.append(self._is_unwritten, more > 0)
        num_bytes = -(-(len(self.live) + 1) * self.per_segment // 8)  # of all segments
        self._used = np.append(self._used, np.zeros(num_bytes - len(self._used), np.uint8))
        self.live, self._is_in_use = np.append(self.live, 0), np.append(self._is_in_use, False)

    def append(self, records: Words, changed: int) -> Slots:
        """Append records for which there is room. `changed`: the largest save number in them."""
        slots, done = np.empty(len(records), np.int64), 0
        while done < len(records):
            if self._block < 0 or self._filled == self.layout.per_block:
                self._next_block()
            num = min(len(records) - done, self.layout.per_block - self._filled)
            self.layout.fill(self._unwritten[self._block], self._filled, records[done : done + num])
            first = self._block * self.layout.per_block + self._filled
            slots[done : done + num] = np.arange(first, first + num)
            kernels.note_used(self._used, first, num)
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
        self._unwritten[self._block] = (
            self._spare.pop() if self._spare else aligned(self.layout.block_bytes).view(np.uint32)
        )
        self._is_unwritten[self._block] = True

    def flush(self) -> None:
        """Begin to write the block that is full."""
        if self._block >= 0 and self._filled == self.layout.per_block:
            words = self._unwritten[self._block]
            self.layout.seal(words, int(self._numbers[self._block]))
            self._disk.begin_write(self._block, self._block * self.layout.block_bytes, words.view(np.uint8))
            self._end_writes(max(0, len(self._unwritten) - len(self._failed) - MOST_UNWRITTEN))

    def _end_writes(self, fewest: int) -> None:
        """Wait for `fewest` writes, and reuse the memory of blocks that are on disk. A block that could not be written
        stays in memory until `reserve` writes it again.
        """
        for block, result in self._disk.end_writes(fewest):
            if result != self.layout.block_bytes:
                self._failed[block] = -result if result < 0 else errno.EIO
                continue
            self._spare.append(self._unwritten.pop(block))
            self._is_unwritten[block] = False
            self._free_if_empty(block // self._blocks_per_segment)

    def _write_again(self) -> None:
        """Write the blocks that could not be written. Raises TableError if one of them still cannot be."""
        failed, self._failed = self._failed, {}
        for block in failed:
            self._disk.begin_write(block, block * self.layout.block_bytes, self._unwritten[block].view(np.uint8))
        self._end_writes(len(failed))
        if self._failed:
            raise file_error(self.folder, "cannot be written", next(iter(self._failed.values())))

    def foresee(self, slots: Slots) -> None:
        """Begin to read the records in these slots, which a request that waits will need."""
        pages = unique((slots // self.layout.per_page).view(np.uint64), many_repeat=False)[0].view(np.int64)
        pages = pages[~self._is_unwritten[pages // self.layout.pages_per_block]]
        if len(pages):
            self._ahead.begin(pages, self._numbers_of(pages))

    def read(self, slots: Slots) -> Words:
        """The records in these slots. Raises TableError if the disk does not return what was written."""
        out = np.empty((len(slots), self.layout.record_words), np.uint32)
        page_of, slot_of = np.divmod(slots, self.layout.per_page)
        places = self._ahead.places_of(page_of, self._numbers_of(page_of))
        self.layout.take(self._ahead.memory, places, slot_of, out)
        left = np.flatnonzero(places < 0)
        if len(left):
            out[left] = self._read_now(page_of[left], slot_of[left])
        return out

    def _read_now(self, page_of: Pages, slot_of: Slots) -> Words:
        """As `read`, for records that were not read ahead."""
        out = np.empty((len(page_of), self.layout.record_words), np.uint32)
        blocks = page_of // self.layout.pages_per_block
        in_memory = self._is_unwritten[blocks]
        for block in np.unique(blocks[in_memory]).tolist():
            pages = page_of - block * self.layout.pages_per_block
            self.layout.take(self._unwritten[block], np.where(blocks == block, pages, -1), slot_of, out)
        rest = np.flatnonzero(~in_memory)
        pages, inverse = np.unique(page_of[rest], return_inverse=True)
        for start in range(0, len(pages), PIECE):
            piece = pages[start : start + PIECE]
            memory = self._room.take(len(piece), self.layout.page_bytes)
            self._reader.read(piece, self._numbers_of(piece), memory)
            places = np.full(len(page_of), -1, np.int64)
            places[rest] = np.where((inverse >= start) & (inverse < start + PIECE), inverse - start, -1)
            self.layout.take(memory.view(np.uint32), places, slot_of, out)
        return out

    def _numbers_of(self, pages: Pages) -> Pages:
        blocks, rest = np.divmod(pages, self.layout.pages_per_block)
        numbers: Pages = self._numbers[blocks] + rest
        return numbers

    def release(self, slots: Slots) -> None:
        """Note that the rows of these slots have moved away."""
        counts = np.bincount(slots // self.per_segment, minlength=len(self.live))
        self.live -= counts
        self.num_live -= len(slots)
        kernels.note_unused(self._used, slots)
        for segment in np.flatnonzero((counts > 0) & (self.live == 0)).tolist():
            self._free_if_empty(segment)

    def _free_if_empty(self, segment: int) -> None:
        """Let a segment be written again, unless some of its records are in use, or some of its blocks wait for the
        disk.
        """
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
        """The ordinal of the next record."""
        if self._block < 0 or self._filled == self.layout.per_block:
            return self._next_number * self.layout.per_page
        return int(self._numbers[self._block]) * self.layout.per_page + self._filled

    def blocks_from(self, start: int, since: int, most: int) -> Pages:
        """The first blocks, at most `most`, with records from the ordinal `start` on that may have been changed in save
        `since` or later; in order.
        """
        ends = (self._numbers + self.layout.pages_per_block) * self.layout.per_page
        if self._block >= 0:
            ends[self._block] = self._numbers[self._block] * self.layout.per_page + self._filled
        wanted = np.flatnonzero((self._numbers > 0) & (ends > start) & (self._changed >= since))
        if len(wanted) > most:
            wanted = wanted[np.argpartition(self._numbers[wanted], most)[:most]]
        return wanted[np.argsort(self._numbers[wanted], kind="stable")]

    def numbers(self, blocks: Pages) -> Pages:
        """The numbers of the first pages of these blocks: a new number means new content. 0: not in use."""
        found: Pages = self._numbers[blocks]
        return found

    def are_on_disk(self, blocks: Pages) -> bool:
        return not self._is_unwritten[blocks].any()

    def end_of(self, block: int) -> int:
        """The ordinal behind the last record of a block."""
        num = self._filled if block == self._block else self.layout.per_block
        return int(self._numbers[block]) * self.layout.per_page + num

    def take_blocks(
        self, blocks: Pages, memory: Words, start: int = 0, since: int = 0, begun_at: int = 0, bit: int = 0,
        head: int = 0,
    ) -> tuple[Slots, Keys, Words]:  # fmt: skip
        """(slots, keys, words from `head` on) of the records in use of these blocks, which were read into `memory`,
        from the ordinal `start` on. Leaves out records that were changed before save `since`, and records from the
        ordinal `begun_at` on that have the bit of a pass.
        """
        layout = self.layout
        pages = self.pages_of(blocks)
        ordinals = self._numbers_of(pages) * layout.per_page  # of the first record of each page
        slots = pages * layout.per_page
        ends = np.minimum(slots + layout.per_page, self._end_of_records(blocks).repeat(layout.pages_per_block))
        first, marked = (slots + np.clip(ordinal - ordinals, 0, layout.per_page) for ordinal in (start, begun_at))
        return layout.take_used(memory, first, np.maximum(first, ends), self._used, since, marked, bit, head)

    def pages_of(self, blocks: Pages) -> Pages:
        num = self.layout.pages_per_block
        return (blocks[:, None] * num + np.arange(num)).reshape(-1)

    def _end_of_records(self, blocks: Pages) -> Slots:
        """The slot behind the last record of each block."""
        num: Slots = np.where(blocks == self._block, self._filled, self.layout.per_block)
        return blocks * self.layout.per_block + num

    def has(self, block: int) -> bool:
        """Whether a block is full and in use."""
        return bool(self._numbers[block]) and block != self._block

    def scan_block(self, block: int) -> tuple[Slots, Keys, Words]:
        """(slots, keys, records) of the records of one block that are in use."""
        blocks = np.array([block])
        return self.take_blocks(blocks, self.read_blocks(blocks))

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

    def read_blocks(self, blocks: Pages) -> Words:
        """The pages of these blocks, in memory that the next call uses again."""
        layout = self.layout
        memory = self._room.take(len(blocks), layout.block_bytes)
        is_here = self._is_unwritten[blocks]
        for i, block in enumerate(blocks.tolist()):
            if is_here[i]:
                memory[i] = self._unwritten[block].view(np.uint8)
        ends = np.flatnonzero(np.diff(np.concatenate([[True], is_here, [True]])))
        for start, stop in ends.reshape(-1, 2).tolist():  # runs of blocks that are on disk
            some = blocks[start:stop]
            self._reader.read(some, self._numbers_of(self.pages_of(some)), memory[start:stop])
        return memory.reshape(-1).view(np.uint32)

    def close(self) -> None:
        """Close the file, which the system then removes. Also done when nothing refers to this object."""
        self._closing()
