"""Checksums of pages: as computed in plain Python, and different for every page that differs."""

from __future__ import annotations

import numpy as np
import pytest

from torchfleet.ps.kernels import pages

NUM_WORDS = 512
BITS = (1 << 64) - 1
PRIME, STEP = 0x9E3779B97F4A7C15, 0xA24BAED4963EE407
MASKS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xE7037ED1A0B428DB


def made(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, (num, NUM_WORDS), np.uint64)


def sums_of(pages_PD: np.ndarray) -> np.ndarray:
    sums = np.empty(len(pages_PD), np.uint64)
    pages.checksums(pages_PD, sums)
    return sums


def expected(words: list[int]) -> int:
    """The checksum of one page, in whole numbers of Python."""
    mask = words[1] * PRIME & BITS
    sums = [words[2], words[3], MASKS[2], MASKS[3]]
    for first in range(4, len(words), 4):
        some = words[first : first + 4]
        for lane, other in enumerate((1, 0, 3, 2)):
            masked = some[lane] ^ (mask + MASKS[lane] & BITS)
            sums[lane] = sums[lane] + (masked & 0xFFFFFFFF) * (masked >> 32) + some[other] & BITS
        mask = mask + STEP & BITS
    total = mask
    for part in sums:
        total = (total ^ part) * PRIME & BITS
        total ^= total >> 32
    return total


@pytest.mark.parametrize("seed", [0, 1])
def test_the_checksum_is_that_of_plain_python(seed: int) -> None:
    pages_PD = made(3, seed)
    pages_PD[1] = 0
    assert sums_of(pages_PD).tolist() == [expected(page) for page in pages_PD.tolist()]


@pytest.mark.parametrize("content", ["zeros", "random"])
def test_every_changed_bit_changes_the_checksum(content: str) -> None:
    page = made(1)[0] if content == "random" else np.zeros(NUM_WORDS, np.uint64)
    changed = np.tile(page, (64 * (NUM_WORDS - 1), 1))
    at = np.arange(len(changed))
    changed[at, 1 + at // 64] ^= np.uint64(1) << (at % 64).astype(np.uint64)
    assert len(np.unique(sums_of(changed))) == len(changed)
    assert sums_of(page[None])[0] not in sums_of(changed)


def test_words_that_changed_places_change_the_checksum() -> None:
    page = made(1)[0]
    swapped = np.tile(page, (NUM_WORDS - 2, 1))
    for i in range(1, NUM_WORDS - 1):  # a word and the next one, and halves of the page
        swapped[i - 1, [i, i + 1]] = page[[i + 1, i]]
    halves = np.concatenate([page[:4], page[256:508], page[4:256], page[508:]])
    assert len(np.unique(sums_of(np.vstack([page, swapped, halves])))) == NUM_WORDS


def test_pages_that_are_not_as_they_were_written_are_told() -> None:
    pages_PD, numbers = made(4), np.arange(7, 11)
    pages_PD[:, 1] = numbers
    pages_PD[:, 0] = sums_of(pages_PD)
    assert pages.first_wrong(pages_PD, numbers) == -1
    assert pages.first_wrong(pages_PD, numbers + np.array([0, 0, 1, 0])) == 2
    pages_PD[1, 300:] = 0  # the end of a page that was never written
    assert pages.first_wrong(pages_PD, numbers) == 1
