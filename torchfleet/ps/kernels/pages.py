"""Records in the pages of a file: [checksum | number of the page | records]; a record is a row with its marks and key.

A page number counts all pages ever written to the file, so that a page that was not overwritten when it should have
been is recognized by its number.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import copy_words
from torchfleet.ps.kernels.jit import inlined, kernel

HEADER_WORDS = 4  # checksum (2 words), page number (2 words)
_HEADER = np.uint64(HEADER_WORDS)
_CHANGED, _PASSES = np.uint64(2), np.uint64(3)  # words of a record, behind the key: see tables/tiers/pages.py
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_S29, _S32, _ONE = np.uint64(29), np.uint64(32), np.uint64(1)


@kernel
def fill(page_words: np.ndarray, words_per_page: int, per_page: int, start: int, records_NW: np.ndarray) -> None:
    """Write records into the pages of a block, from its record number `start` on."""
    width = np.uint64(records_NW.shape[1])
    flat = records_NW.reshape(-1)
    for i in range(len(records_NW)):
        page, slot = divmod(start + i, per_page)
        to = np.uint64(page) * np.uint64(words_per_page) + _HEADER + np.uint64(slot) * width
        copy_words(page_words, to, flat, np.uint64(i) * width, width)


@kernel
def take(
    page_words: np.ndarray, words_per_page: int, per_page: int, pages_N: np.ndarray, slots_N: np.ndarray,
    out_NW: np.ndarray,
) -> None:  # fmt: skip
    """out_NW[i] = record slots_N[i] of page pages_N[i]."""
    width = np.uint64(out_NW.shape[1])
    flat = out_NW.reshape(-1)
    for i in range(len(pages_N)):
        source = np.uint64(pages_N[i]) * np.uint64(words_per_page) + _HEADER + np.uint64(slots_N[i]) * width
        copy_words(flat, np.uint64(i) * width, page_words, source, width)


@inlined
def _mixed(word: np.uint64) -> np.uint64:
    word *= _PRIME
    return word ^ (word >> _S32)


@inlined
def _checksum(pages_PD: np.ndarray, p: int) -> np.uint64:
    """A checksum over all 64-bit words of a page but the first, which holds it. The number of words is even."""
    # four sums side by side: each step of one waits for the step before
    a, b, c, d = _PRIME, _PRIME << _ONE, _PRIME << _S29, _mixed(pages_PD[p, 1])
    for i in range(2, pages_PD.shape[1] - 3, 4):
        a = (a + _mixed(pages_PD[p, i])) * _PRIME
        b = (b + _mixed(pages_PD[p, i + 1])) * _PRIME
        c = (c + _mixed(pages_PD[p, i + 2])) * _PRIME
        d = (d + _mixed(pages_PD[p, i + 3])) * _PRIME
    if pages_PD.shape[1] % 4 == 0:
        a = (a + _mixed(pages_PD[p, -2])) * _PRIME
        b = (b + _mixed(pages_PD[p, -1])) * _PRIME
    a = (a ^ (b >> _S29) ^ b) * _PRIME
    c = (c ^ (d >> _S29) ^ d) * _PRIME
    a = (a + (c ^ (c >> _S32))) * _PRIME
    return a ^ (a >> _S32)


@kernel
def checksums(pages_PD: np.ndarray, sums_P: np.ndarray) -> None:
    """sums_P[p] = the checksum of page p."""
    for p in range(len(pages_PD)):
        sums_P[p] = _checksum(pages_PD, p)


@inlined
def is_page(pages_PD: np.ndarray, p: int, number: int) -> bool:
    """Whether page p has this number, and its checksum."""
    return pages_PD[p, 1] == np.uint64(number) and pages_PD[p, 0] == _checksum(pages_PD, p)


@kernel
def first_wrong(pages_PD: np.ndarray, numbers_P: np.ndarray) -> int:
    """The first page whose number or checksum is wrong; -1 if all pages are right."""
    for p in range(len(numbers_P)):
        if not is_page(pages_PD, p, numbers_P[p]):
            return p
    return -1


@kernel
def note_used(used_B: np.ndarray, first: int, num: int) -> None:
    """Set the bits of `num` records from `first` on."""
    for slot in range(first, first + num):
        used_B[slot >> 3] |= np.uint8(1 << (slot & 7))


@kernel
def note_unused(used_B: np.ndarray, slots_N: np.ndarray) -> None:
    """Clear the bits of these records."""
    for i in range(len(slots_N)):
        used_B[slots_N[i] >> 3] &= np.uint8(~(1 << (slots_N[i] & 7)))


@kernel
def take_used(
    page_words: np.ndarray, words_per_page: int, per_page: int, slots_P: np.ndarray, ends_P: np.ndarray,
    used_B: np.ndarray, since: int, marked_P: np.ndarray, bit: np.uint32, slots_N: np.ndarray, keys_N: np.ndarray,
    head: int, out_NW: np.ndarray,
) -> int:  # fmt: skip
    """Copy the records of pages that are in use: out_NW their words from `head` on, keys_N their keys, slots_N their
    numbers. Returns how many.

    slots_P: the numbers of each page's first record to take and, ends_P, of the one behind its last. Left out are
    records that were changed before save `since` and, from the number marked_P of each page on, those with `bit`.
    """
    width, skipped = np.uint64(out_NW.shape[1]), np.uint64(head)
    flat, num = out_NW.reshape(-1), 0
    for p in range(len(slots_P)):
        for slot in range(slots_P[p], ends_P[p]):
            if used_B[slot >> 3] >> (slot & 7) & 1 == 0:
                continue
            source = np.uint64(p) * np.uint64(words_per_page) + _HEADER + np.uint64(slot % per_page) * (width + skipped)
            if page_words[source + _CHANGED] < since or (slot >= marked_P[p] and page_words[source + _PASSES] & bit):
                continue
            slots_N[num] = slot
            keys_N[num] = np.uint64(page_words[source]) | np.uint64(page_words[source + _ONE]) << _S32
            copy_words(flat, np.uint64(num) * width, page_words, source + skipped, width)
            num += 1
    return num
