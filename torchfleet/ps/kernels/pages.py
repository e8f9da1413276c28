"""Records in the pages of a file: [checksum | number of the page | records]; a record is a row with its marks and key.

A page number counts all pages ever written to the file, so that a page that was not overwritten when it should have
been is recognized by its number.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import copy_words
from torchfleet.ps.kernels.jit import kernel

HEADER_WORDS = 4  # checksum (2 words), page number (2 words)
_HEADER = np.uint64(HEADER_WORDS)
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


@kernel
def checksums(pages_PD: np.ndarray, sums_P: np.ndarray) -> None:
    """A checksum over all 64-bit words of a page but the first, which holds it."""
    for p in range(len(pages_PD)):
        # four sums side by side: each step of one waits for the step before
        a, b, c, d = _PRIME, _PRIME << _ONE, _PRIME << _S29, _PRIME << _S32
        for i in range(1, pages_PD.shape[1]):
            word = pages_PD[p, i] * _PRIME
            word ^= word >> _S32
            if i & 3 == 0:
                a = (a + word) * _PRIME
            elif i & 3 == 1:
                b = (b + word) * _PRIME
            elif i & 3 == 2:
                c = (c + word) * _PRIME
            else:
                d = (d + word) * _PRIME
        a = (a ^ (b >> _S29) ^ b) * _PRIME
        c = (c ^ (d >> _S29) ^ d) * _PRIME
        a = (a + (c ^ (c >> _S32))) * _PRIME
        sums_P[p] = a ^ (a >> _S32)
