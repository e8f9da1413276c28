"""All records of a table on disk, in the order in which they were appended; a thread reads the blocks that come next.

A block never changes while its number stays the same. One that was written again after it was read ahead is left out:
its rows have moved to later blocks, or to memory.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.tiers.cold_file import PageReader, Pages, Room
from torchfleet.ps.tables.tiers.cold_rows import ColdRows
from torchfleet.ps.tables.tiers.disk import Bytes
from torchfleet.ps.tables.tiers.pages import RECORD_HEAD, Slots, Words

BLOCKS = 16  # read and taken at once, 4 MiB: a disk reads eight at a time at half of its speed
PLANNED = 1024  # blocks put in order at once
AHEAD = 2  # pieces that are read while one is taken
MOST_WAIT = 0.005  # seconds to wait for the disk, for a caller that handles requests in between


@dataclass
class _Piece:
    """Some blocks, and the reading of them, if it has begun."""

    blocks: Pages
    numbers: Pages
    room: Room | None = None
    memory: Bytes | None = None
    reading: Future[None] | None = None


class Scan:
    """One walk over the records in use. Owned by one thread. The end of its context ends the thread that reads."""

    def __init__(
        self, cold: ColdRows, since: int = 0, begun_at: int = 0, bit: int = 0, most_wait: float | None = None
    ) -> None:
        """Leaves out records that were changed before save `since`, and those from the ordinal `begun_at` on that have
        the bit of a pass. `most_wait`: seconds after which `take` returns without records if the disk is busy.
        """
        self._most_wait = most_wait
        self._cold, self._since, self._begun_at, self._bit = cold, since, begun_at, bit
        self._pieces: deque[_Piece] = deque()
        self._rooms = [Room() for _ in range(AHEAD + 1)]  # that no piece uses
        self._thread: tuple[ThreadPoolExecutor, PageReader] | None = None

    def __enter__(self) -> Scan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread[0].shutdown()
            self._thread[1].close()

    def take(self, start: int) -> tuple[Slots, Keys, Words, int]:
        """(slots, keys, words of rows, the ordinal after the last) of some records in use from the ordinal `start` on,
        which is where the last call ended. At the end there are no records, and the ordinal is `next_ordinal`; while
        the disk is busy there are no records, and the ordinal is `start`.
        """
        cold = self._cold
        while True:
            if not self._pieces:
                self._plan(start)
            if not self._pieces:
                return *self._nothing(), cold.next_ordinal
            self._read_on()
            if not self._is_read(self._pieces[0]):
                return *self._nothing(), start
            piece = self._pieces.popleft()
            memory = self._memory(piece)
            is_same = cold.numbers(piece.blocks) == piece.numbers
            if is_same.any():
                break
        blocks = piece.blocks[is_same]
        is_read = memory is not None and is_same.all()
        words = memory.reshape(-1).view(np.uint32) if is_read else cold.read_blocks(blocks)  # type: ignore[union-attr]
        found = cold.take_blocks(blocks, words, start, self._since, self._begun_at, self._bit, RECORD_HEAD)
        return *found, cold.end_of(int(blocks[-1]))

    def _plan(self, start: int) -> None:
        blocks = self._cold.blocks_from(start, self._since, PLANNED)
        numbers = self._cold.numbers(blocks)
        for first in range(0, len(blocks), BLOCKS):
            some = slice(first, first + BLOCKS)
            self._pieces.append(_Piece(blocks[some], numbers[some]))

    def _read_on(self) -> None:
        """Begin to read the first piece and those behind it. Blocks that are not on disk yet are read by `take`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="scan"), self._cold.make_reader()
        thread, reader = self._thread
        for piece in list(self._pieces)[: AHEAD + 1]:
            if piece.reading is None and self._cold.are_on_disk(piece.blocks):
                piece.room = self._rooms.pop()
                piece.memory = piece.room.take(len(piece.blocks), self._cold.layout.block_bytes)
                pages = self._cold.pages_of(piece.blocks)
                num = self._cold.layout.pages_per_block
                numbers = piece.numbers.repeat(num) + pages % num
                piece.reading = thread.submit(reader.read, piece.blocks, numbers, piece.memory)

    def _nothing(self) -> tuple[Slots, Keys, Words]:
        none = np.empty((0, self._cold.layout.row_words), np.uint32)
        return np.empty(0, np.int64), np.empty(0, np.uint64), none

    def _is_read(self, piece: _Piece) -> bool:
        """Whether this piece has been read, or its reading was not begun. Waits for it, at most `most_wait` seconds."""
        return piece.reading is None or bool(wait([piece.reading], self._most_wait).done)

    def _memory(self, piece: _Piece) -> Bytes | None:
        """What was read ahead, valid until the next call; None if it must be read again, which raises the error."""
        if piece.room is None or piece.reading is None:
            return None
        error = piece.reading.exception()
        self._rooms.append(piece.room)
        if error is not None and not isinstance(error, TableError):
            raise error
        return piece.memory if error is None else None
