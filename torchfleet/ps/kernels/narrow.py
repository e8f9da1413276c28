"""Rows of narrow numbers: bfloat16, float16, and int8 with a step per row; to float32 and back.

Rounding is to the nearest number (ties to even), or stochastic: up with a probability that is the distance to the
number below, so that the expected result is the exact value. The random bits of a number are a function of a stream (of
seed and table), the row's key, the table's update and the column: no state, no order, equal on every machine.

`wide_NC` are float32 rows whose first `dim` columns are values, `bits_NC` the same as bits. Narrow rows are given as
the halves or bytes of their 32-bit words. Numbers are finite; what is beyond the type's largest becomes the largest.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.jit import inlined, kernel

_GOLDEN, _SALT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xA4093822299F31D0)
_GOLDEN32, _F1, _F2 = np.uint32(0x9E3779B9), np.uint32(0x21F0AAAD), np.uint32(0x735A2D97)
_S8, _S13, _S15, _S16 = np.uint32(8), np.uint32(13), np.uint32(15), np.uint32(16)
_S32 = np.uint64(32)
_U1, _LOW16, _LOW13 = np.uint32(1), np.uint32(0xFFFF), np.uint32(0x1FFF)
_MAGNITUDE, _SIGN16 = np.uint32(0x7FFFFFFF), np.uint32(0x8000)
_INFINITE_BF16, _MOST_F16, _INFINITE_F16 = np.uint32(0x7F80), np.uint32(0x7BFF), np.uint32(0x7C00)
_LEAST_F16, _BEYOND_F16 = np.uint32(0x38800000), np.uint32(0x47800000)  # 2^-14 and 2^16 as float32
_BIAS_F16, _INFINITE = np.uint32(0x38000000), np.uint32(0x7F800000)  # difference of the exponents' zero points
_TINY_F16, _TINY_F16_BACK = np.float64(2.0**24), np.float32(2.0**-24)  # subnormal float16 are multiples of 2^-24
_UNIT = np.float32(2.0**-24)
MOST_STEPS = np.float32(127.0)
MOST_INT8 = np.float32(2.0**127)  # larger numbers become that: 127 steps are finite
LEAST_STEP = np.float32(2.0**-100)  # a row whose numbers need a smaller step is zeros
_HALF, _TWO, _ZERO = np.float32(0.5), np.float32(2.0), np.float32(0.0)


@inlined
def base_of(key: np.uint64, stream: np.uint64, step: np.uint64) -> np.uint64:
    """The random bits of a row's update, from which those of its numbers follow."""
    return mix((stream ^ _SALT) + mix(key + mix(step * _GOLDEN)))


@inlined
def bits_at(base: np.uint64, d: int) -> np.uint32:
    """32 random bits for column `d`: a mixing of base and column in operations of 32 bits, which fill vectors."""
    x = np.uint32(np.uint32(base) + np.uint32(np.uint32(d) * _GOLDEN32))
    x = np.uint32((x ^ (x >> _S16)) * _F1)
    x = np.uint32((x ^ (x >> _S15)) * _F2)
    return np.uint32((x ^ (x >> _S15)) ^ np.uint32(base >> _S32))


@kernel
def bf16_to_wide(halves_NH: np.ndarray, bits_NC: np.ndarray, dim: int) -> None:
    """The upper half of a float32 becomes that float32."""
    for i in range(len(bits_NC)):
        for d in range(dim):
            bits_NC[i, d] = np.uint32(halves_NH[i, d]) << _S16


@kernel
def wide_to_bf16(
    bits_NC: np.ndarray,
    halves_NH: np.ndarray,
    dim: int,
    keys_N: np.ndarray,
    stream: np.uint64,
    step: np.uint64,
    is_stochastic: bool,
) -> None:
    """Add random bits, or a half, below the last bit that is kept, and cut."""
    for i in range(len(bits_NC)):
        base = base_of(keys_N[i], stream, step) if is_stochastic else np.uint64(0)
        for d in range(dim):
            bits = bits_NC[i, d]
            added = bits_at(base, d) & _LOW16 if is_stochastic else _LOW16 // np.uint32(2) + ((bits >> _S16) & _U1)
            kept = np.uint32(bits + added) >> _S16
            if kept & _INFINITE_BF16 == _INFINITE_BF16:
                kept = bits >> _S16
            halves_NH[i, d] = np.uint16(kept)


@kernel
def f16_to_wide(halves_NH: np.ndarray, wide_NC: np.ndarray, bits_NC: np.ndarray, dim: int) -> None:
    """Shifts the zero point of the exponent; converts subnormal numbers by multiplication."""
    for i in range(len(wide_NC)):
        for d in range(dim):
            half = np.uint32(halves_NH[i, d])
            sign, rest = (half & _SIGN16) << _S16, half & (_SIGN16 - _U1)
            if rest < np.uint32(0x400):
                tiny = np.float32(rest) * _TINY_F16_BACK
                wide_NC[i, d] = -tiny if sign else tiny
            elif rest < _INFINITE_F16:
                bits_NC[i, d] = sign | np.uint32((rest << _S13) + _BIAS_F16)
            else:
                bits_NC[i, d] = sign | _INFINITE


@kernel
def wide_to_f16(
    wide_NC: np.ndarray,
    bits_NC: np.ndarray,
    halves_NH: np.ndarray,
    dim: int,
    keys_N: np.ndarray,
    stream: np.uint64,
    step: np.uint64,
    is_stochastic: bool,
) -> None:
    """As wide_to_bf16, with 13 bits to cut; numbers below 2^-14 are rounded to multiples of 2^-24."""
    for i in range(len(wide_NC)):
        base = base_of(keys_N[i], stream, step) if is_stochastic else np.uint64(0)
        for d in range(dim):
            bits = bits_NC[i, d]
            size, random = bits & _MAGNITUDE, bits_at(base, d)
            if size < _LEAST_F16:
                exact = np.float64(abs(wide_NC[i, d])) * _TINY_F16
                rounded = np.floor(exact + np.float64(random) * 2.0**-32) if is_stochastic else np.rint(exact)
                kept = np.uint32(rounded)
            else:
                added = random & _LOW13 if is_stochastic else _LOW13 // np.uint32(2) + ((size >> _S13) & _U1)
                near = np.uint32(size + added)
                kept = _MOST_F16 if near >= _BEYOND_F16 else np.uint32(near - _BIAS_F16) >> _S13
            halves_NH[i, d] = np.uint16(kept | ((bits >> _S16) & _SIGN16))


@kernel
def int8_to_wide(bytes_NB: np.ndarray, steps_NW: np.ndarray, wide_NC: np.ndarray, dim: int) -> None:
    """w = step · q. The first word of a row is its step, the bytes behind it are q."""
    for i in range(len(wide_NC)):
        step = steps_NW[i, 0]
        for d in range(dim):
            wide_NC[i, d] = step * np.float32(bytes_NB[i, 4 + d])


@inlined
def _largest(wide_NC: np.ndarray, i: int, dim: int) -> np.float32:
    most = _ZERO
    for d in range(dim):
        most = max(most, abs(wide_NC[i, d]))
    return most


@inlined
def _put_row(
    wide_NC: np.ndarray, bytes_NB: np.ndarray, i: int, dim: int, width: np.float32, base: np.uint64, is_stochastic: bool
) -> None:
    """q = w / step, rounded, and kept within ± 127; zeros if the step is 0."""
    for d in range(dim):
        exact = wide_NC[i, d] / width if width > _ZERO else _ZERO
        near = np.floor(exact + np.float32(bits_at(base, d) >> _S8) * _UNIT) if is_stochastic else np.rint(exact)
        bytes_NB[i, 4 + d] = np.int8(min(max(near, -MOST_STEPS), MOST_STEPS))


@kernel
def wide_to_int8(
    wide_NC: np.ndarray,
    bytes_NB: np.ndarray,
    steps_NW: np.ndarray,
    dim: int,
    keys_N: np.ndarray,
    stream: np.uint64,
    step: np.uint64,
    is_stochastic: bool,
) -> None:
    """The step of a row is its largest magnitude / 127."""
    for i in range(len(wide_NC)):
        most = _largest(wide_NC, i, dim)
        width = most / MOST_STEPS if most <= MOST_INT8 else MOST_INT8 / MOST_STEPS
        width = width if width >= LEAST_STEP else _ZERO
        steps_NW[i, 0] = width
        base = base_of(keys_N[i], stream, step) if is_stochastic else np.uint64(0)
        _put_row(wide_NC, bytes_NB, i, dim, width, base, is_stochastic)


@kernel
def wide_to_steps(wide_NC: np.ndarray, bytes_NB: np.ndarray, steps_NW: np.ndarray, dim: int) -> None:
    """Round to the nearest multiples of steps that are given."""
    for i in range(len(wide_NC)):
        _put_row(wide_NC, bytes_NB, i, dim, steps_NW[i, 0], np.uint64(0), False)


@kernel
def first_steps(wide_NC: np.ndarray, steps_NW: np.ndarray, dim: int, least: np.float32, for_zeros: np.float32) -> None:
    """A step to learn from: the row's largest magnitude / 127, at least `least`; `for_zeros` for a row of zeros."""
    for i in range(len(wide_NC)):
        width = max(min(_largest(wide_NC, i, dim), MOST_INT8) / MOST_STEPS, least)
        steps_NW[i, 0] = width if width > LEAST_STEP else for_zeros


@kernel
def learn_steps(
    before_NC: np.ndarray,
    wide_NC: np.ndarray,
    bytes_NB: np.ndarray,
    steps_NW: np.ndarray,
    dim: int,
    rate: np.float32,
    keys_N: np.ndarray,
    stream: np.uint64,
    step: np.uint64,
) -> None:
    """One update of int8 rows with a learned step Δ, from their values before and after the rule's update:

    Δ ← Δ + rate · Σ (after - before) · e / √(127 dim), at least Δ / 2 and at most 2 Δ, where e is the derivative of the
    rounded value by Δ: ± 127 for a value beyond ± 127 Δ, else round(w / Δ) - w / Δ. Then the values are rounded.
    """
    scale = rate / np.sqrt(MOST_STEPS * np.float32(dim))
    for i in range(len(wide_NC)):
        width, total = steps_NW[i, 0], _ZERO
        for d in range(dim):
            exact = wide_NC[i, d] / width
            near = min(max(np.rint(exact), -MOST_STEPS), MOST_STEPS)
            slope = near if abs(exact) > MOST_STEPS else near - exact
            total += (wide_NC[i, d] - before_NC[i, d]) * slope
        width = max(min(max(width + scale * total, _HALF * width), _TWO * width), LEAST_STEP)
        steps_NW[i, 0] = width
        _put_row(wide_NC, bytes_NB, i, dim, width, base_of(keys_N[i], stream, step), True)
