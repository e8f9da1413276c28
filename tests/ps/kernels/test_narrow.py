"""Narrow numbers against torch and numpy: nearest, and stochastic rounding that is unbiased and repeatable."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.searches import examples

from torchfleet.ps.kernels import narrow
from torchfleet.ps.tables.rows.codecs import FIRST_STEP, Codec, Dice, LearnedInt8, codec_of

Floats = npt.NDArray[np.float32]

DIM = 5
DTYPES = ("bfloat16", "float16", "int8")
STREAM = np.uint64(77)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
BLOCKS = arrays(np.float32, (3, DIM), elements=FINITE)


def keys_of(num: int) -> npt.NDArray[np.uint64]:
    return np.arange(num, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def rounded(codec: Codec, wide: Floats, dice: Dice | None = None) -> Floats:
    words = np.zeros((len(wide), codec.num_words), np.uint32)
    codec.narrow(keys_of(len(wide)), wide, words, dice)
    return widened(codec, words)


def widened(codec: Codec, words: npt.NDArray[np.uint32]) -> Floats:
    wide = np.full((len(words), codec.dim), np.nan, np.float32)
    codec.widen(words, wide)
    return wide


def nearest(name: str, wide: Floats) -> Floats:
    """What torch and numpy make of these numbers; beyond the largest, the largest."""
    if name == "float16":
        return np.clip(wide, -65504, 65504).astype(np.float16).astype(np.float32)
    if name == "bfloat16":
        most = float(torch.finfo(torch.bfloat16).max)
        made: Floats = torch.from_numpy(wide).bfloat16().clamp(-most, most).float().numpy()
        return made
    steps = np.minimum(np.abs(wide).max(axis=1, keepdims=True), np.float32(2.0**127)) / np.float32(127)
    steps = np.where(steps < 2.0**-100, np.float32(0), steps)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(steps > 0, np.clip(np.rint(wide / steps), -127, 127) * steps, np.float32(0)).astype(np.float32)


def gaps(name: str, wide: Floats) -> Floats:
    """The distance between the two representable numbers around each."""
    if name == "bfloat16":
        return np.maximum(np.ldexp(np.float32(1), np.frexp(wide)[1] - 8), 2.0**-133).astype(np.float32)
    if name == "float16":
        return np.maximum(np.ldexp(np.float32(1), np.frexp(wide)[1] - 11), 2.0**-24).astype(np.float32)
    steps = np.maximum(np.abs(wide).max(axis=1, keepdims=True) / np.float32(127), np.float32(127 * 2.0**-100))
    found: Floats = np.broadcast_to(steps, wide.shape)  # rows that need a step below 2^-100 are zeros
    return found


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=examples(60))
@given(wide=BLOCKS)
def test_nearest_is_that_of_torch_and_numpy(name: str, wide: Floats) -> None:
    if name == "bfloat16":  # torch rounds the largest float32 up to infinity
        wide = np.clip(wide, -3.3e38, 3.3e38)
    assert np.array_equal(rounded(codec_of(name, DIM), wide), nearest(name, wide))


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=examples(60))
@given(wide=BLOCKS, update=st.integers(0, 2**63))
def test_what_is_representable_stays_as_it_is(name: str, wide: Floats, update: int) -> None:
    codec = codec_of(name, DIM)
    words = np.zeros((len(wide), codec.num_words), np.uint32)
    codec.narrow(keys_of(len(wide)), wide, words)
    once = widened(codec, words)
    if name == "int8":  # the step may differ in its last bit
        assert np.allclose(rounded(codec, once, Dice(STREAM, update)), once, rtol=1e-6, atol=0)
    else:
        assert np.array_equal(rounded(codec, once, Dice(STREAM, update)), once)
        assert np.array_equal(rounded(codec, once), once)


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=examples(60))
@given(wide=arrays(np.float32, (3, DIM), elements=st.floats(-1e4, 1e4, width=32)), update=st.integers(0, 2**63))
def test_stochastic_rounding_goes_to_a_neighbour(name: str, wide: Floats, update: int) -> None:
    made = rounded(codec_of(name, DIM), wide, Dice(STREAM, update))
    assert (np.abs(made - wide) <= gaps(name, wide) * np.float32(1.0001)).all()


@pytest.mark.parametrize("name", DTYPES)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """The mean over 20,000 updates is within five standard deviations of the exact value."""
    num, codec = 20_000, codec_of(name, DIM)
    row = np.array([1.0, 0.3337, -0.00123456, 3e-6, -0.7], np.float32)
    sums = np.zeros(DIM)
    words = np.zeros((1, codec.num_words), np.uint32)
    for update in range(num):
        codec.narrow(keys_of(1), row[None], words, Dice(STREAM, update))
        sums += widened(codec, words)[0]
    bound = 5 * gaps(name, row[None])[0] / 2 / np.sqrt(num)
    assert (np.abs(sums / num - row) <= bound).all()


@pytest.mark.parametrize("name", DTYPES)
def test_the_bits_follow_from_stream_key_update_and_column(name: str) -> None:
    codec, wide = codec_of(name, DIM), np.random.default_rng(1).normal(size=(400, DIM)).astype(np.float32)
    base = rounded(codec, wide, Dice(STREAM, 5))
    assert np.array_equal(rounded(codec, wide, Dice(STREAM, 5)), base)
    assert not np.array_equal(rounded(codec, wide, Dice(STREAM, 6)), base)
    assert not np.array_equal(rounded(codec, wide, Dice(np.uint64(78), 5)), base)
    same = np.full((400, DIM), 0.3337, np.float32)
    same[:, -1] = 1.0  # the step of int8 rows
    made = rounded(codec, same, Dice(STREAM, 5))
    assert (made[:, 0] != made[:, 1]).any()
    assert len(np.unique(made[:, 0])) == 2
    order = np.random.default_rng(2).permutation(400)
    words = np.zeros((400, codec.num_words), np.uint32)
    codec.narrow(keys_of(400)[order], wide[order], words, Dice(STREAM, 5))
    assert np.array_equal(widened(codec, words), base[order])


def test_random_bits_are_spread_evenly() -> None:
    """Of 32 bits each is set in about half of 2^16 draws, also for neighbouring keys, updates and columns."""
    words = np.zeros((1 << 12, 9), np.uint32)
    wide = np.full((1 << 12, 16), 2.0**-24, np.float32)
    codec = codec_of("bfloat16", 16)
    wide.view(np.uint32)[:] = 0x3F800000 + (1 << 15)  # halfway between two numbers
    codec.narrow(np.arange(1 << 12, dtype=np.uint64), wide, words, Dice(np.uint64(0), 0))
    ups = (widened(codec, words[:, : codec.num_words].copy()) > 1).mean(axis=0)
    assert np.abs(ups - 0.5).max() < 5 * 0.5 / 64


def test_what_is_too_large_becomes_the_largest() -> None:
    wide = np.array([[3.4e38, -3.4e38, 1e5, -65519.0, 65505.0]], np.float32)
    for dice in (None, Dice(STREAM, 3)):
        assert np.isfinite(rounded(codec_of("bfloat16", DIM), wide, dice)).all()
        assert rounded(codec_of("float16", DIM), wide, dice)[0].tolist() == [65504, -65504, 65504, -65504, 65504]


def test_rows_of_zeros_and_of_tiny_numbers_are_zeros_in_int8() -> None:
    for value in (0.0, 1e-38, 1e-45):
        wide = np.full((1, DIM), value, np.float32)
        assert not rounded(codec_of("int8", DIM), wide, Dice(STREAM, 1)).any()


def learned(before: Floats, after: Floats, steps: Floats, rate: float) -> Floats:
    """The oracle of learned steps, in float64."""
    exact = after.astype(np.float64) / steps[:, None]
    near = np.clip(np.rint(exact), -127, 127)
    slopes = np.where(np.abs(exact) > 127, near, near - exact)
    moved = steps + rate * ((after - before) * slopes).sum(axis=1) / np.sqrt(127 * before.shape[1])
    found: Floats = np.clip(moved, steps / 2, steps * 2).astype(np.float32)
    return found


def test_a_step_is_learned_as_the_oracle_says() -> None:
    dice = np.random.default_rng(3)
    codec = LearnedInt8("int8", DIM, 0.5)
    before = dice.normal(size=(50, DIM)).astype(np.float32)
    words = np.zeros((50, codec.num_words), np.uint32)
    codec.begin(keys_of(50), before, words)
    steps = words.view(np.float32)[:, 0].copy()
    assert np.abs(widened(codec, words) - before).max() <= steps.max() / 2 * 1.001
    old = widened(codec, words)
    after = old + dice.normal(size=old.shape).astype(np.float32) * np.float32(0.3)
    codec.update(keys_of(50), old, after, words, Dice(STREAM, 1))
    found = words.view(np.float32)[:, 0]
    assert np.allclose(found, learned(old, after, steps, 0.5), rtol=1e-5)
    assert (found != steps).mean() > 0.9
    kept = np.clip(after, -127 * found[:, None], 127 * found[:, None])
    assert (np.abs(widened(codec, words) - kept) <= found[:, None] * 1.001).all()


def test_a_learned_step_grows_until_the_values_fit() -> None:
    codec = LearnedInt8("int8", DIM, 0.01)
    words = np.zeros((1, codec.num_words), np.uint32)
    codec.begin(keys_of(1), np.zeros((1, DIM), np.float32), words)
    assert words.view(np.float32)[0, 0] == FIRST_STEP
    for update in range(400):
        old = widened(codec, words)
        codec.update(keys_of(1), old, old + np.float32(0.05), words, Dice(STREAM, update))
    assert widened(codec, words).min() > 10  # 20 if nothing were cut


def test_steps_that_are_given_are_kept() -> None:
    codec: Any = codec_of("int8", DIM)
    words = np.zeros((4, codec.num_words), np.uint32)
    codec.narrow(keys_of(4), np.random.default_rng(1).normal(size=(4, DIM)).astype(np.float32), words, Dice(STREAM, 9))
    wide, again = widened(codec, words), words.copy()
    narrow.wide_to_steps(wide, again.view(np.int8), again.view(np.float32), DIM)
    assert np.array_equal(again, words)
