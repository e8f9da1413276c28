"""Formats blocks of float32 numbers as decimal text, twenty times as fast as Python does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# All numbers use the same columns. Unused columns stay zero and are removed at the end:
#   -  0  .  000  d  .  dddddddd  e  -  dd  blank
_WIDTH = 21
_SIGN, _FIRST, _POINT, _REST, _EXPONENT, _END = 0, 6, 7, 8, 16, 20
_LOW, _HIGH = -46, 39  # exponents of float32 lie between them
_LEAST = -4  # numbers below 0.0001, and numbers from 10 on, are written with an exponent


def _layout(exponent: int) -> bytes:
    """The columns of a number d.dddddddd × 10^exponent, its digits left out."""
    if _LEAST <= exponent < 0:
        return (b"\0" + b"0." + b"0" * (-exponent - 1)).ljust(_END, b"\0") + b" "
    written = b"e%+03d" % exponent if exponent else b""
    return (b".".rjust(_REST, b"\0").ljust(_EXPONENT, b"\0") + written).ljust(_END, b"\0") + b" "


def _kept(num_zeros: int) -> npt.NDArray[np.uint8]:
    """1 for the columns that are kept if the last `num_zeros` digits are zeros; 0 for the point if no digit follows."""
    kept = np.ones(_WIDTH, np.uint8)
    kept[_EXPONENT - num_zeros : _EXPONENT] = 0
    kept[_POINT] = num_zeros < 8
    return kept


_LAYOUTS = np.array([list(_layout(exponent)) for exponent in range(_LOW, _HIGH + 1)], np.uint8)
_KEPT = np.array([_kept(num) for num in range(9)], np.uint8)
_POWERS = np.array([float(f"1e{8 - exponent}") for exponent in range(_LOW, _HIGH + 1)])
_DIGITS = np.frombuffer(b"".join(b"%04d" % num for num in range(10_000)), np.uint32)  # four ASCII digits in each
_TRAILING = np.array([4 - len(f"{num:04}".rstrip("0")) for num in range(10_000)], np.intp)


def lines_of(values: npt.NDArray[np.float32]) -> list[bytes]:
    """A line for each row, with a blank between two numbers. All numbers must be finite.

    Nine digits, without zeros at the end, distinguish all float32 numbers. The last digit may differ by one from
    what Python writes; the text still reads back to the same number.
    """
    exponents, mantissas = _scientific(values.reshape(-1))
    first, rest = np.divmod(mantissas, 10**8)
    high, low = np.divmod(rest, 10**4)
    columns = _LAYOUTS.take(exponents - _LOW, axis=0)
    columns[:, _SIGN] = np.signbit(values.reshape(-1)) * np.uint8(ord("-"))
    columns[:, _FIRST] = first + ord("0")
    columns[:, _REST:_EXPONENT] = np.stack((_DIGITS.take(high), _DIGITS.take(low)), axis=1).view(np.uint8)
    columns *= _KEPT.take(np.where(low, _TRAILING.take(low), 4 + _TRAILING.take(high)), axis=0)
    columns.reshape(*values.shape, _WIDTH)[:, -1, _END] = ord("\n")
    return columns.tobytes().translate(None, b"\0").splitlines()


def _scientific(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Exponents, and mantissas of nine digits; both are zero for zero."""
    size = np.abs(values.astype(np.float64))
    is_zero = size == 0
    exponents = np.floor(np.log10(np.where(is_zero, 1.0, size))).astype(np.intp)
    mantissas = np.rint(size * _POWERS.take(exponents - _LOW))
    # The logarithm is rounded, and so is the mantissa: either can cross a power of ten.
    off = (mantissas >= 1e9).astype(np.intp) - ((mantissas < 1e8) & ~is_zero)
    if off.any():
        exponents += off
        mantissas = np.rint(size * _POWERS.take(exponents - _LOW))
    return exponents, mantissas.astype(np.intp)
