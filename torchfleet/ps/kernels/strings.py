"""The string hash of docs/data.md over whole arrays of strings of a fixed width: numpy's bytes and numpy's text."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.text import hash_bytes

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_U0, _U1, _U8 = np.uint64(0), np.uint64(1), np.uint64(8)
_LOW6, _LEAD = np.uint64(0x3F), np.uint64(0x80)
_S6, _S12, _S18, _S16, _S24 = np.uint64(6), np.uint64(12), np.uint64(18), np.uint64(16), np.uint64(24)
_2_BYTES, _3_BYTES, _4_BYTES = np.uint64(0xC0), np.uint64(0xE0), np.uint64(0xF0)


@kernel
def hash_padded_bytes(text_B: np.ndarray, width: int, seed: np.uint64, hashes_N: np.ndarray) -> None:
    """Hashes of strings of `width` bytes each, without the zero bytes at their ends; eight bytes follow the last."""
    for i in range(len(hashes_N)):
        begin = np.uint64(i * width)
        end = np.uint64((i + 1) * width)
        while end > begin and text_B[end - _U1] == 0:
            end -= _U1
        hashes_N[i] = hash_bytes(text_B, begin, end, seed)


@inlined
def utf8_width(code: np.uint64) -> np.uint64:
    """Bytes of a code point in UTF-8; 0 if it has none. U+DC80..U+DCFF stand for single bytes (surrogateescape)."""
    if code < np.uint64(0x80) or (np.uint64(0xDC80) <= code <= np.uint64(0xDCFF)):
        return _U1
    if code < np.uint64(0x800):
        return np.uint64(2)
    if np.uint64(0xD800) <= code <= np.uint64(0xDFFF) or code > np.uint64(0x10FFFF):
        return _U0
    return np.uint64(3) if code < np.uint64(0x10000) else np.uint64(4)


@inlined
def utf8_word(code: np.uint64, width: np.uint64) -> np.uint64:
    """The bytes of a code point in UTF-8, the first one lowest."""
    if width == _U1:
        return code & np.uint64(0xFF)
    last = _LEAD | (code & _LOW6)
    if width == np.uint64(2):
        return (_2_BYTES | (code >> _S6)) | (last << _U8)
    third = _LEAD | ((code >> _S6) & _LOW6)
    if width == np.uint64(3):
        return (_3_BYTES | (code >> _S12)) | (third << _U8) | (last << _S16)
    second = _LEAD | ((code >> _S12) & _LOW6)
    return (_4_BYTES | (code >> _S18)) | (second << _U8) | (third << _S16) | (last << _S24)


@kernel
def hash_padded_text(codes_C: np.ndarray, width: int, seed: np.uint64, hashes_N: np.ndarray) -> int:
    """Hashes of the UTF-8 bytes of strings of `width` code points each, without the zeros at their ends.

    Returns -1, or the number of the first string that has no UTF-8: one with a code point that is a surrogate.
    """
    for i in range(len(hashes_N)):
        begin, end = i * width, (i + 1) * width
        while end > begin and codes_C[end - 1] == 0:
            end -= 1
        num_bytes = _U0
        for at in range(begin, end):
            num = utf8_width(np.uint64(codes_C[at]))
            if num == _U0:
                return i
            num_bytes += num
        h = mix(seed + _GOLDEN * (num_bytes + _U1))
        word, filled = _U0, _U0
        for at in range(begin, end):
            code = np.uint64(codes_C[at])
            num = utf8_width(code)
            encoded = utf8_word(code, num)
            word |= encoded << (_U8 * filled)
            filled += num
            if filled >= _U8:
                h = mix(h ^ word)
                filled -= _U8
                word = encoded >> (_U8 * (num - filled)) if filled else _U0
        hashes_N[i] = mix(h ^ word) if filled else h
    return -1
