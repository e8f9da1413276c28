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
_STEP = np.uint64(0xA24BAED4963EE407)  # odd, so that no two places of a page have the same mask
_MASK_A, _MASK_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK_C, _MASK_D = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xE7037ED1A0B428DB)
_LOW, _S32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_ZERO, _ONE, _TWO, _THREE, _FOUR, _SEVEN = (np.uint64(number) for number in (0, 1, 2, 3, 4, 7))
_BIT = np.uint8(1)


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
    """out_NW[i] = record slots_N[i] of page pages_N[i]; stays as it is if that is negative."""
    width = np.uint64(out_NW.shape[1])
    flat = out_NW.reshape(-1)
    for i in range(len(pages_N)):
        if pages_N[i] < 0:
            continue
        source = np.uint64(pages_N[i]) * np.uint64(words_per_page) + _HEADER + np.uint64(slots_N[i]) * width
        copy_words(flat, np.uint64(i) * width, page_words, source, width)


@inlined
def _folded(word: np.uint64) -> np.uint64:
    return (word & _LOW) * (word >> _S32)


@inlined
def _checksum(pages_PD: np.ndarray, p: int) -> np.uint64:
    """A checksum over all 64-bit words of a page but the first, which holds it. The number of words divides by four.

    As XXH3 does, halves of words are multiplied, under a mask that differs from place to place, and each word is added
    to another sum: products of 32 bits are quick on all processors, those of 64 bits are not on Neoverse-N1.
    """
    words, size = pages_PD.reshape(-1), np.uint64(pages_PD.shape[1])
    first = np.uint64(p) * size
    mask = words[first + _ONE] * _PRIME  # the number of the page
    # four sums side by side: each step of one waits for the step before
    a, b, c, d = words[first + _TWO], words[first + _THREE], _MASK_C, _MASK_D
    for i in range(first + _FOUR, first + size, _FOUR):  # without a sign: numba looks for negative positions otherwise
        v, w, x, y = words[i], words[i + _ONE], words[i + _TWO], words[i + _THREE]
        a += _folded(v ^ (mask + _MASK_A)) + w
        b += _folded(w ^ (mask + _MASK_B)) + v
        c += _folded(x ^ (mask + _MASK_C)) + y
        d += _folded(y ^ (mask + _MASK_D)) + x
        mask += _STEP
    total = mask
    for part in (a, b, c, d):
        total = (total ^ part) * _PRIME
        total ^= total >> _S32
    return total


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
def find_read(
    places_F: np.ndarray, pages_M: np.ndarray, numbers_M: np.ndarray, pages_N: np.ndarray, numbers_N: np.ndarray,
    places_N: np.ndarray,
) -> None:  # fmt: skip
    """places_N[i] = where in a memory of M pages the page pages_N[i] of the file is, with the number numbers_N[i]; -1
    if it is not there.

    places_F: by page of the file, where it was read to last. pages_M, numbers_M: which page is there now.
    """
    for i in range(len(pages_N)):
        page = pages_N[i]
        place = np.int64(places_F[page]) if page < len(places_F) else 0
        is_there = pages_M[place] == page and numbers_M[place] == numbers_N[i]
        places_N[i] = place if is_there else -1


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

    slots_P: the number of each page's first record to take; ends_P: the number behind its last. Leaves out records that
    were changed before save `since`, and from the number marked_P of each page on, records with `bit`.
    """
    width, skipped = np.uint64(out_NW.shape[1]), np.uint64(head)
    flat, num = out_NW.reshape(-1), _ZERO
    for p in range(len(slots_P)):
        first, end, marked = np.uint64(slots_P[p]), np.uint64(ends_P[p]), np.uint64(marked_P[p])
        begin = first - first % np.uint64(per_page)
        start = np.uint64(p) * np.uint64(words_per_page) + _HEADER
        for slot in range(first, end):
            if used_B[slot >> _THREE] >> np.uint8(slot & _SEVEN) & _BIT == 0:
                continue
            source = start + (slot - begin) * (width + skipped)
            if page_words[source + _CHANGED] < since or (slot >= marked and page_words[source + _PASSES] & bit):
                continue
            slots_N[num] = slot
            keys_N[num] = np.uint64(page_words[source]) | np.uint64(page_words[source + _ONE]) << _S32
            copy_words(flat, num * width, page_words, source + skipped, width)
            num += _ONE
    return np.int64(num)
