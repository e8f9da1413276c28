"""Reads the numbers of JSON texts of one form: all text except the numbers in some arrays is known beforehand."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import load_word
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.numerals import GOOD, MAX_FLOAT32, digit_of, read_digits, read_exponent, scaled

_U0, _U1, _U8 = np.uint64(0), np.uint64(1), np.uint64(8)
_BLANK, _COMMA, _MINUS, _POINT, _OPEN, _CLOSE, _ZERO = (np.uint8(ord(sign)) for sign in " ,-.[]0")
_MAX_INT = np.uint64((1 << 63) - 1)
_E, _LOWER = np.uint8(ord("e")), np.uint8(32)
_EXACT = np.uint64(1 << 53)


@kernel
def read_arrays(
    text_B: np.ndarray,
    literals_L: np.ndarray,
    ends_T: np.ndarray,
    is_float_T: np.ndarray,
    columns_T2: np.ndarray,
    ints_NI: np.ndarray,
    floats_NF: np.ndarray,
    tens_P: np.ndarray,
    fives_P2: np.ndarray,
    bits_1: np.ndarray,
    double_1: np.ndarray,
) -> bool:
    """Read a text that consists of literals and, between two of them, an array of numbers; False for any other text.

    Literal t ends at ends_T[t] of literals_L; array t follows it. Its numbers are written to the columns from
    columns_T2[t, 0] to columns_T2[t, 1] of ints_NI or floats_NF, sample by sample. Also False for numbers that only
    Python can read exactly, and for those that int64 or float32 does not hold. `double_1` is a view of `bits_1`. text_B
    and literals_L end with a newline and eight more bytes; the last literal is the rest of the text.
    """
    at, begin = _U0, _U0
    for t in range(len(is_float_T)):
        end = np.uint64(ends_T[t])
        if not _is_literal(text_B, at, literals_L, begin, end):
            return False
        at, begin = at + end - begin, end
        first, last = columns_T2[t, 0], columns_T2[t, 1]
        sign = _OPEN
        for i in range(len(ints_NI)):
            for column in range(first, last):
                if text_B[at] != sign:
                    return False
                at = _after_blanks(text_B, at + _U1)
                if is_float_T[t]:
                    value, at, is_good = _float(text_B, at, tens_P, fives_P2, bits_1, double_1)
                    floats_NF[i, column] = value
                else:
                    whole, at, is_good = _int(text_B, at)
                    ints_NI[i, column] = whole
                if not is_good:
                    return False
                at = _after_blanks(text_B, at)
                sign = _COMMA
        if text_B[at] != _CLOSE:
            return False
        at += _U1
    end = np.uint64(ends_T[len(is_float_T)])
    size = np.uint64(len(text_B)) - np.uint64(9)
    return at + end - begin == size and _is_literal(text_B, at, literals_L, begin, end)


@inlined
def _is_literal(text_B: np.ndarray, at: np.uint64, literals_L: np.ndarray, begin: np.uint64, end: np.uint64) -> bool:
    if at + end - begin + np.uint64(9) > np.uint64(len(text_B)):
        return False
    while begin + _U8 <= end:
        if load_word(text_B, at) != load_word(literals_L, begin):
            return False
        at += _U8
        begin += _U8
    while begin < end:
        if text_B[at] != literals_L[begin]:
            return False
        at += _U1
        begin += _U1
    return True


@inlined
def _after_blanks(text_B: np.ndarray, at: np.uint64) -> np.uint64:
    while text_B[at] == _BLANK:
        at += _U1
    return at


@inlined
def _has_zeros_first(text_B: np.ndarray, first: np.uint64, at: np.uint64) -> bool:
    """Whether a number begins with 0 and more digits, which JSON does not allow."""
    return at - first > _U1 and digit_of(text_B[first]) == np.uint8(0)


@inlined
def _int(text_B: np.ndarray, at: np.uint64) -> tuple[np.int64, np.uint64, bool]:
    """(number, place behind it, whether it fits int64; also False for the lowest one, -2^63)."""
    is_negative = text_B[at] == _MINUS
    first = at + np.uint64(is_negative)
    value, at = read_digits(text_B, first, _U0)
    is_good = at > first and at - first <= np.uint64(19) and value <= _MAX_INT
    is_good = is_good and not _has_zeros_first(text_B, first, at)
    return -np.int64(value) if is_negative else np.int64(value), at, is_good


@inlined
def _float(
    text_B: np.ndarray,
    at: np.uint64,
    tens_P: np.ndarray,
    fives_P2: np.ndarray,
    bits_1: np.ndarray,
    double_1: np.ndarray,
) -> tuple[float, np.uint64, bool]:
    """(number, place behind it, whether it was read exactly and fits float32)."""
    is_negative = text_B[at] == _MINUS
    first = at + np.uint64(is_negative)
    mantissa, at = read_digits(text_B, first, _U0)
    num_digits, num_zeros, power = at - first, _U0, np.int64(0)
    is_good = num_digits > _U0 and not _has_zeros_first(text_B, first, at)
    if text_B[at] == _POINT:
        point = at + _U1
        if mantissa == _U0:  # zeros in front do not count as digits
            num_digits = _U0
            while text_B[point + num_zeros] == _ZERO:
                num_zeros += _U1
        mantissa, at = read_digits(text_B, point, mantissa)
        num_digits += at - point - num_zeros
        power = -np.int64(at - point)
        is_good = is_good and at > point
    if (text_B[at] | _LOWER) == _E:
        exponent, at, status = read_exponent(text_B, at + _U1)
        power += exponent
        is_good = is_good and status == GOOD
    value = 0.0
    if not is_good or num_digits > np.uint64(19):
        return value, at, False
    if mantissa <= _EXACT and power >= -22 and power <= 22:
        value = float(mantissa) / tens_P[-power] if power < 0 else float(mantissa) * tens_P[power]
    elif mantissa:
        bits_1[0], status = scaled(mantissa, power, fives_P2)
        value, is_good = double_1[0], status == GOOD
    return -value if is_negative else value, at, is_good and value < MAX_FLOAT32
