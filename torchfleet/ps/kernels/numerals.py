"""Decimal numbers from text, as exactly as Python reads them, without allocation."""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.intrinsics import leading_zeros, load_word, trailing_zeros
from torchfleet.ps.kernels.jit import inlined

# Results of parsing a number. HARD: a valid number whose last bit only Python's own float() can determine.
GOOD, BAD, RANGE, HARD = 0, 1, 2, 3

_ONES = 0x0101010101010101
_U0, _U1, _U10 = np.uint64(0), np.uint64(1), np.uint64(10)
_LOW = np.uint64(0xFFFFFFFF)
_S32, _S63 = np.uint64(32), np.uint64(63)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_INT_MIN = np.uint64(1 << 63)
_MOST_TENTH = np.uint64(((1 << 64) - 1) // 10)
_EXACT = np.uint64(1 << 53)
_IMPLICIT = np.uint64(1 << 52)
_ZEROS, _OVER_NINE, _HIGH_BITS = np.uint64(0x30 * _ONES), np.uint64(0x46 * _ONES), np.uint64(0x80 * _ONES)
_PAIRS = np.uint64(0x000000FF000000FF)
_BY_PAIR, _BY_LAST_PAIR = np.uint64(100 + (1000000 << 32)), np.uint64(1 + (10000 << 32))
_FIRST_POWER, _LAST_POWER = -342, 308
MAX_FLOAT32 = 3.4028235677973366e38  # numbers from here on round to infinity


def powers_of_ten() -> tuple[np.ndarray, np.ndarray]:
    """(1, 10, ..., 1e22), all exact; and 128-bit approximations of 5^q for q in -342..308: (high, low) words.

    Truncated for positive, rounded up for negative powers, each scaled so that its highest bit is set: the table of the
    Eisel-Lemire algorithm ("Number parsing at a gigabyte per second", 2021).
    """
    table = np.empty((_LAST_POWER - _FIRST_POWER + 1, 2), np.uint64)
    for row, q in enumerate(range(_FIRST_POWER, _LAST_POWER + 1)):
        power = 5 ** abs(q)
        bits = power.bit_length()
        if q >= 0:
            value = power << (128 - bits) if bits <= 128 else power >> (bits - 128)
        else:
            shift = bits + 127
            value = (1 << shift) // power + 1
            while value >= 1 << 128:
                value >>= 1
        table[row] = value >> 64, value & ((1 << 64) - 1)
    return np.array([float(10**k) for k in range(23)]), table


@inlined
def digit_of(byte: np.uint8) -> np.uint8:
    """0 to 9, or more if it is not a digit."""
    return np.uint8(byte - np.uint8(48))


@inlined
def ends_token(byte: np.uint8) -> bool:
    """Blank, tab, carriage return or newline."""
    return byte <= np.uint8(32) and byte in (np.uint8(32), np.uint8(9), np.uint8(10), np.uint8(13))


@inlined
def read_digits(text_B: np.ndarray, at: np.uint64, value: np.uint64) -> tuple[np.uint64, np.uint64]:
    """(value with the digits from `at` on appended, position behind them); modulo 2^64.

    Reads eight bytes at a time: carries reveal bytes that are not digits, and the digits before the first of them are
    combined in pairs, fours and eights.
    """
    num = np.uint64(8)
    while num == np.uint64(8):
        word = load_word(text_B, at)
        strangers = ((word + _OVER_NINE) | (word - _ZEROS)) & _HIGH_BITS
        num = trailing_zeros(strangers) >> np.uint64(3)
        if num == _U0:
            break
        word = (word - _ZEROS) << ((np.uint64(8) - num) << np.uint64(3))
        word = word * _U10 + (word >> np.uint64(8))
        word = ((word & _PAIRS) * _BY_PAIR + ((word >> np.uint64(16)) & _PAIRS) * _BY_LAST_PAIR) >> _S32
        value = value * power_of_ten(num) + word
        at += num
    return value, at


@inlined
def power_of_ten(num: np.uint64) -> np.uint64:
    """10^num for num from 1 to 8, in at most three multiplications."""
    power = np.uint64(10) if num & _U1 else _U1
    if num & np.uint64(2):
        power *= np.uint64(100)
    if num & np.uint64(4):
        power *= np.uint64(10000)
    if num & np.uint64(8):
        power *= np.uint64(100000000)
    return power


@inlined
def read_int(text_B: np.ndarray, at: np.uint64) -> tuple[np.uint64, np.uint64, int]:
    """(64 bits of the number, place behind it, GOOD / BAD / RANGE): from -2^63 to 2^64 - 1.

    Here and below, the text ends with a newline, which stops every loop, and eight more bytes, which may be loaded.
    """
    negative = text_B[at] == np.uint8(45)
    first = at + np.uint64(negative or text_B[at] == np.uint8(43))
    value, at = read_digits(text_B, first, _U0)
    status = GOOD
    if at == first or not ends_token(text_B[at]):
        status = BAD
    elif at - first > np.uint64(19):
        status = RANGE if is_too_long(text_B, first, at) else GOOD
    if negative:
        if status == GOOD and value > _INT_MIN:
            status = RANGE
        value = _U0 - value
    return value, at, status


@inlined
def is_too_long(text_B: np.ndarray, first: np.uint64, end: np.uint64) -> bool:
    """Whether a sequence of digits is 2^64 or more."""
    value = _U0
    for k in range(first, end):
        digit = np.uint64(digit_of(text_B[k]))
        if value > _MOST_TENTH or (value == _MOST_TENTH and digit > np.uint64(5)):
            return True
        value = value * _U10 + digit
    return False


@inlined
def times(a: np.uint64, b: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The 128-bit product: (high, low)."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _S32, b & _LOW, b >> _S32
    low = a_low * b_low
    middle = a_high * b_low + (low >> _S32)
    other = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _S32) + (other >> _S32), (other << _S32) | (low & _LOW)


@inlined
def scaled(mantissa: np.uint64, power: int, fives_P2: np.ndarray) -> tuple[np.uint64, int]:
    """(bits of the double nearest to mantissa × 10^power, GOOD), or HARD for subnormal and other rare ones."""
    if power < _FIRST_POWER or power > _LAST_POWER:
        return _U0, HARD
    zeros = leading_zeros(mantissa)
    shifted = mantissa << zeros
    row = power - _FIRST_POWER
    high, low = times(shifted, fives_P2[row, 0])
    if high & np.uint64(0x1FF) == np.uint64(0x1FF):
        more, _ = times(shifted, fives_P2[row, 1])
        low += more
        if more > low:
            high += _U1
        if low == _ALL:
            return _U0, HARD
    upper = high >> _S63
    shift = upper + np.uint64(9)
    digits = high >> shift
    exponent = ((217706 * power) >> 16) + 63 + np.int64(upper) - np.int64(zeros) + 1023
    if exponent <= 0 or exponent >= 2046:
        return _U0, HARD
    half_way = low <= _U1 and power >= -4 and power <= 23 and (digits & np.uint64(3)) == _U1 and digits << shift == high
    if half_way:
        digits &= ~_U1  # exactly between two doubles: round to even
    digits = (digits + (digits & _U1)) >> _U1
    if digits >= _IMPLICIT << _U1:
        digits = _IMPLICIT
        exponent += 1
    return (np.uint64(exponent) << np.uint64(52)) | (digits & ~_IMPLICIT), GOOD


@inlined
def read_float(
    text_B: np.ndarray,
    at: np.uint64,
    tens_P: np.ndarray,
    fives_P2: np.ndarray,
    bits_1: np.ndarray,
    double_1: np.ndarray,
) -> tuple[float, np.uint64, int]:
    """(number, place behind it, GOOD / BAD / RANGE / HARD). `double_1` is a view of `bits_1`."""
    negative = text_B[at] == np.uint8(45)
    first = at + np.uint64(negative or text_B[at] == np.uint8(43))
    mantissa, at = read_digits(text_B, first, _U0)
    num_digits = at - first
    power = np.int64(0)
    if text_B[at] == np.uint8(46):
        point = at + _U1
        mantissa, at = read_digits(text_B, point, mantissa)
        num_digits += at - point
        power = -np.int64(at - point)
    status = GOOD if num_digits else BAD
    if (text_B[at] | np.uint8(32)) == np.uint8(101) and num_digits:
        exponent, at, status = read_exponent(text_B, at + _U1)
        power += exponent
    if not ends_token(text_B[at]):
        status = BAD
    value = 0.0
    if status == GOOD:
        if num_digits > np.uint64(19):  # they may not fit, unless most are leading zeros
            status = HARD
        elif mantissa <= _EXACT and power >= -22 and power <= 22:
            value = float(mantissa) / tens_P[-power] if power < 0 else float(mantissa) * tens_P[power]
        elif mantissa:
            bits_1[0], status = scaled(mantissa, power, fives_P2)
            value = double_1[0]
    if status == GOOD and value >= MAX_FLOAT32:
        status = RANGE
    return -value if negative else value, at, status


@inlined
def read_exponent(text_B: np.ndarray, at: np.uint64) -> tuple[np.int64, np.uint64, int]:
    """The number after the e, clamped to a million."""
    minus = text_B[at] == np.uint8(45)
    first = at + np.uint64(minus or text_B[at] == np.uint8(43))
    at = first
    exponent = np.int64(0)
    while digit_of(text_B[at]) < np.uint8(10):
        exponent = min(np.int64(1000000), exponent * 10 + np.int64(digit_of(text_B[at])))
        at += _U1
    return -exponent if minus else exponent, at, BAD if at == first else GOOD
