"""CRC-32C by the processor's instruction: as computed bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from torchfleet.ps.kernels.checksum import HAS_INSTRUCTION, WORD, crc32c_of_words

POLYNOMIAL = 0x82F63B78  # of Castagnoli, its bits in reverse


def expected(data: bytes, crc: int = 0) -> int:
    """The checksum in whole numbers of Python."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.skipif(not HAS_INSTRUCTION, reason="this processor has no instruction for CRC-32C")
@pytest.mark.parametrize("offset", [0, 1, 5])  # whatever the alignment
@pytest.mark.parametrize("num_words", [0, 1, 2, 77])
def test_words_have_the_checksum_of_their_bytes(num_words: int, offset: int) -> None:
    memory = np.random.default_rng(num_words).integers(0, 256, offset + num_words * WORD, np.uint8)
    data = memory[offset:]
    assert expected(b"123456789") == 0xE3069283, "the oracle itself"
    for before in (0, 0xE3069283, 0xFFFFFFFF):
        assert crc32c_of_words(data.ctypes.data, num_words, before) == expected(data.tobytes(), before)
