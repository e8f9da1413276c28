"""The changes of a table that a subscriber has not received: numbers of rows, and keys where these are not known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels import marks
from torchfleet.ps.kernels.levels import take_new
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.tables.rows.keymap import Keys, Rows
from torchfleet.ps.tables.settings.spec import Floats
from torchfleet.ps.tables.table import Table

COMPACT_AT = 1 << 18  # keys
_NOTED = 1 << 15  # recent keys that are not noted a second time: 256 KiB, which stay in the processor's cache
_NONE: Keys = np.empty(0, np.uint64)
_NO_ROWS: Rows = np.empty(0, np.int64)


@dataclass(slots=True)
class PendingKeys:
    """Keys that a subscriber has not received. Duplicates are removed whenever the number of keys has doubled, so it is
    at most twice the number of rows that the table ever had."""

    pieces: deque[Keys] = field(default_factory=deque)
    num: int = 0
    sent: Keys = field(default_factory=lambda: _NONE)  # in the last reply, which may be lost
    compact_at: int = COMPACT_AT
    noted: Keys = field(default_factory=lambda: np.zeros(_NOTED, np.uint64))  # most keys that were noted since `take`

    def note(self, keys: Keys) -> None:
        """Keys are copied."""
        new = np.empty(len(keys), np.uint64)
        self._add(new[: take_new(self.noted, keys, new)])

    def _add(self, keys: Keys) -> None:
        self.pieces.append(keys)
        self.num += len(keys)
        if self.num > self.compact_at:
            self.pieces = deque([unique(np.concatenate(self.pieces))[0].copy()])
            self.num = len(self.pieces[0])
            self.compact_at = max(COMPACT_AT, 2 * self.num)

    def take(self, most: int) -> Keys:
        """At most `most` keys, the oldest first, with few duplicates. They count as `sent` until `settle`."""
        taken, num = [_NONE], 0
        if self.pieces:
            self.noted[:] = 0
        while self.pieces and num < most:
            piece = self.pieces.popleft()
            if num + len(piece) > most:
                self.pieces.appendleft(piece[most - num :])
                piece = piece[: most - num]
            taken.append(piece)
            num += len(piece)
        self.num -= num
        self.sent = np.concatenate(taken)
        return self.sent

    def settle(self, is_received: bool) -> None:
        """The last reply was received, or its keys must be sent again."""
        if not is_received and len(self.sent):
            self._add(self.sent)
        self.sent = _NONE


class PendingRows:
    """Numbers of rows that a subscriber has not received, as a bitmap. A push knows them, so no key is looked up."""

    def __init__(self) -> None:
        self.num = 0
        self._sent = _NO_ROWS
        self._words: npt.NDArray[np.uint64] = np.zeros(marks.PAGE_WORDS, np.uint64)
        self._pages: npt.NDArray[np.uint8] = np.zeros(1, np.uint8)
        self._next = 0  # row at which `take` continues, so that no row waits while earlier ones change again and again

    def note(self, at: Rows) -> None:
        num_new, num_beyond = marks.add(self._words, self._pages, at)
        if num_beyond:
            self._grow(int(at.max()) + 1)
            num_new += marks.add(self._words, self._pages, at)[0]
        self.num += num_new

    def take(self, most: int) -> Rows:
        """At most `most` rows, ascending. They count as sent until `settle`."""
        taken = np.empty(min(most, self.num), np.int64)
        self.num -= len(taken)
        num = marks.take(self._words, self._pages, self._next, taken)
        if num < len(taken):
            marks.take(self._words, self._pages, 0, taken[num:])
        if len(taken):
            self._next = int(taken[-1]) + 1
        self._sent = np.roll(taken, -num)  # those from row 0 on come first
        return self._sent

    def settle(self, is_received: bool) -> None:
        """As PendingKeys.settle."""
        if not is_received:
            self.note(self._sent)
        self._sent = _NO_ROWS

    def _grow(self, num_rows: int) -> None:
        num_pages = max(2 * len(self._pages), -(-num_rows // marks.PAGE_ROWS))
        words, pages = np.zeros(num_pages * marks.PAGE_WORDS, np.uint64), np.zeros(num_pages, np.uint8)
        words[: len(self._words)], pages[: len(self._pages)] = self._words, self._pages
        self._words, self._pages = words, pages


@dataclass(slots=True)
class Pending:
    """The changes of one table that a subscriber has not received: rows where their numbers are known, else keys."""

    keys: PendingKeys = field(default_factory=PendingKeys)
    rows: PendingRows = field(default_factory=PendingRows)

    @property
    def num(self) -> int:
        return self.keys.num + self.rows.num

    def note(self, keys: Keys, at: Rows | None) -> None:
        """These keys changed, or lost their rows. `at`: the numbers of their rows; None: not known, or not stable. Both
        are copied."""
        if at is None:
            self.keys.note(keys)
        else:
            self.rows.note(at)

    def take(self, table: Table, most: int) -> tuple[Keys, Floats, Keys]:
        """(keys, their current values, keys without a row): at most `most` keys in all."""
        asked = self.keys.take(most)
        at = self.rows.take(most - len(asked))
        if not len(asked):
            return *table.present_at(at), asked
        is_there, values = table.present(asked)
        keys = asked[is_there]
        if len(at):
            more_keys, more_values = table.present_at(at)
            keys, values = np.concatenate([keys, more_keys]), np.concatenate([values, more_values])
        return keys, values, asked[~is_there]

    def settle(self, is_received: bool) -> None:
        """As PendingKeys.settle."""
        self.keys.settle(is_received)
        self.rows.settle(is_received)
