"""How rows lie in the file of a table on two tiers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import pages as kernels
from torchfleet.ps.kernels.pages import HEADER_WORDS
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, Keys

MARK_WORDS = 2  # of a record: the interval of its last change, the bits of passes over all rows
RECORD_HEAD = KEY_WORDS + MARK_WORDS
SECTOR = 4096  # bytes that the disk reads at once
MOST_WASTE = 0.1  # share of a page that may stay empty
BLOCK_BYTES = 1 << 18  # written at once

Words = npt.NDArray[np.uint32]
Slots = npt.NDArray[np.int64]  # numbers of records in the file


@dataclass(frozen=True)
class Layout:
    """Sizes of records, pages and blocks for rows of `row_words` words."""

    row_words: int

    @cached_property
    def record_words(self) -> int:
        return RECORD_HEAD + self.row_words

    @cached_property
    def page_bytes(self) -> int:
        """The smallest page that holds records without much waste."""
        page = SECTOR
        while True:
            room = page // 4 - HEADER_WORDS
            used = room // self.record_words * self.record_words
            if used >= (1 - MOST_WASTE) * room:
                return page
            page += SECTOR

    @cached_property
    def per_page(self) -> int:
        return (self.page_bytes // 4 - HEADER_WORDS) // self.record_words

    @cached_property
    def pages_per_block(self) -> int:
        return max(1, BLOCK_BYTES // self.page_bytes)

    @cached_property
    def per_block(self) -> int:
        """Records of a block."""
        return self.per_page * self.pages_per_block

    @cached_property
    def block_bytes(self) -> int:
        return self.page_bytes * self.pages_per_block

    def fill(self, block: Words, start: int, records: Words) -> None:
        """Write records into a block, from its record number `start` on."""
        kernels.fill(block, self.page_bytes // 4, self.per_page, start, records)

    def take(self, pages: Words, page_of: Any, slot_of: Any, out: Words) -> None:
        """Copy records to `out`, by page, counted from the first of `pages`, and slot. Pages below 0 are left out."""
        kernels.take(pages.reshape(-1), self.page_bytes // 4, self.per_page, page_of, slot_of, out)

    def take_used(
        self, pages: Words, slots: Slots, ends: Slots, used: npt.NDArray[np.uint8], since: int, marked: Slots, bit: int,
        head: int,
    ) -> tuple[Slots, Keys, Words]:  # fmt: skip
        """(numbers, keys, words from `head` on) of the records of these pages that are in use: as kernels.take_used."""
        most = int((ends - slots).sum())
        numbers, keys = np.empty(most, np.int64), np.empty(most, np.uint64)
        out = np.empty((most, self.record_words - head), np.uint32)
        words, sizes, bits = pages.reshape(-1), (self.page_bytes // 4, self.per_page), np.uint32(bit)
        num = kernels.take_used(words, *sizes, slots, ends, used, since, marked, bits, numbers, keys, head, out)
        return numbers[:num], keys[:num], out[:num]

    def seal(self, block: Words, first_number: int) -> None:
        """Write the numbers and checksums of a block's pages."""
        pages = block.view(np.uint64).reshape(-1, self.page_bytes // 8)
        pages[:, 1] = first_number + np.arange(len(pages))
        sums = np.empty(len(pages), np.uint64)
        kernels.checksums(pages, sums)
        pages[:, 0] = sums

    def check(self, pages: Words, numbers: npt.NDArray[np.int64], place: str) -> None:
        """Raise TableError unless these are the pages with these numbers, as they were written."""
        words = pages.view(np.uint64).reshape(-1, self.page_bytes // 8)
        wrong = kernels.first_wrong(words, numbers)
        if wrong >= 0:
            raise TableError(
                f"{place}: page {numbers[wrong]} of the cold-row file has a wrong number or checksum: the disk lost or "
                "changed data. Restart from the last save, on another disk."
            )


def records_of(keys: Keys, words: Words, changed: Words, bits: Words) -> Words:
    """Records of rows. `changed`: the interval between two saves in which each changed last; `bits`: see passes.py."""
    out = np.empty((len(keys), RECORD_HEAD + words.shape[1]), np.uint32)
    out[:, :KEY_WORDS] = keys.view(np.uint32).reshape(-1, KEY_WORDS)
    out[:, KEY_WORDS], out[:, KEY_WORDS + 1] = changed, bits
    out[:, RECORD_HEAD:] = words
    return out


def keys_of(records: Words) -> Keys:
    """The keys of records, in a new array."""
    return np.ascontiguousarray(records[:, :KEY_WORDS]).view(np.uint64).reshape(-1)
