"""CRC-32C: as its standard has it, by the processor's instruction and without."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from torchfleet.ps.kernels import checksum
from torchfleet.ps.kernels.checksum import crc32c

# RFC 3720, appendix B.4.
STANDARD = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def plain(data: bytes, crc: int = 0) -> int:
    """Bit by bit."""
    crc ^= 0xFFFFFFFF
    for byte in data + bytes(-len(data) % 8):
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(("data", "expected"), STANDARD)
def test_it_is_that_of_the_standard(data: bytes, expected: int) -> None:
    assert crc32c(data) == plain(data) == expected


@given(some.binary(max_size=100), some.binary(max_size=100))
def test_it_goes_on_from_what_comes_before(first: bytes, second: bytes) -> None:
    before = crc32c(first)
    assert before == plain(first)
    assert crc32c(memoryview(b"x" + second)[1:], before) == plain(second, before)  # whatever the alignment


@given(some.integers(0, 2**32 - 1), some.integers(0, 2**64 - 1))
def test_processors_without_the_instruction_come_to_the_same(crc: int, word: int) -> None:
    data = word.to_bytes(8, "little")
    assert by_table(np.uint32(crc ^ 0xFFFFFFFF), np.uint64(word)) ^ 0xFFFFFFFF == plain(data, crc)


@numba.njit
def by_table(crc: np.uint32, word: np.uint64) -> np.uint32:
    return checksum._add_word_by_table(crc, word)
