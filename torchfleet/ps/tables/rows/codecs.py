"""Values of rows in fewer bits: how float32 values become the words that a table stores, and back.

A codec works on blocks: `wide` are float32 rows (values, then state), `words` are the 32-bit words of their values.
kernels/narrow.py has the arithmetic. The same codecs encode rows on the network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import narrow
from torchfleet.ps.tables.settings.row_format import RowFormat, value_words

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
Arrays = dict[str, npt.NDArray[Any]]
SCALE = "scale"  # the name of the steps of int8 rows, one per row, among arrays and columns
FIRST_STEP = np.float32(2.0**-13)  # the least first step of a row whose step is learned: first values are small


class Dice(NamedTuple):
    """Determines the random bits of stochastic rounding, together with key and column."""

    stream: np.uint64  # differs by table, on servers also by the table's seed
    update: int  # the number of the table's update


_NO_DICE = np.uint64(0), np.uint64(0), False


def _thrown(dice: Dice | None) -> tuple[np.uint64, np.uint64, bool]:
    return _NO_DICE if dice is None else (dice.stream, np.uint64(dice.update), True)


class Codec(ABC):
    """Rows of `dim` values in `num_words` words each."""

    dtype: np.dtype[Any]  # of the values in a separate array, as in saves

    def __init__(self, name: str, dim: int) -> None:
        self.name, self.dim, self.num_words = name, dim, value_words(name, dim)

    @abstractmethod
    def widen(self, words: Words, wide: Floats) -> None:
        """Fill in the values of `wide` from `words`. Both are contiguous; `words` may have more columns."""

    @abstractmethod
    def narrow(self, keys: Keys, wide: Floats, words: Words, dice: Dice | None = None) -> None:
        """Fill in the first words of `words` from the values of `wide`, by stochastic rounding with dice, else to the
        nearest.
        """

    def update(self, keys: Keys, before: Floats, wide: Floats, words: Words, dice: Dice) -> None:
        """As `narrow`, for rows whose values a rule has changed from `before`; `words` still hold the old values."""
        self.narrow(keys, wide, words, dice)

    def begin(self, keys: Keys, wide: Floats, words: Words) -> None:
        """As `narrow` without dice, for the first values of rows."""
        self.narrow(keys, wide, words)

    def arrays(self, words: Words) -> Arrays:
        """The values as they are saved: `row_values`, and for int8 the steps."""
        return {"row_values": self._values(words).view(self.dtype)}

    def words_of(self, arrays: Arrays) -> Words:
        """The inverse of `arrays`. Raises TableError if a value is NaN or infinite, or a step is out of range."""
        values = arrays["row_values"]
        words = np.zeros((len(values), self.num_words), np.uint32)
        self._values(words)[:] = values.view(self._values(words).dtype)
        wide = np.empty((len(values), self.dim), np.float32)
        self.widen(words, wide)
        if not np.isfinite(wide).all():
            raise TableError("NaN or infinity among the values of rows")
        return words

    @abstractmethod
    def _values(self, words: Words) -> npt.NDArray[Any]:
        """A view of the values, (rows, dim), in their stored type."""


class _Halves(Codec):
    """Numbers of 16 bits."""

    def _values(self, words: Words) -> npt.NDArray[Any]:
        return words.view(np.uint16)[:, : self.dim]


class BFloat16(_Halves):
    """The upper half of a float32: 8 bits of precision, the same range."""

    dtype = np.dtype("<u2")  # numpy has no bfloat16

    def widen(self, words: Words, wide: Floats) -> None:
        narrow.bf16_to_wide(words.view(np.uint16), wide.view(np.uint32), self.dim)

    def narrow(self, keys: Keys, wide: Floats, words: Words, dice: Dice | None = None) -> None:
        narrow.wide_to_bf16(wide.view(np.uint32), words.view(np.uint16), self.dim, keys, *_thrown(dice))


class Float16(_Halves):
    """IEEE half precision: 11 bits of precision, up to 65,504."""

    dtype = np.dtype("<f2")

    def widen(self, words: Words, wide: Floats) -> None:
        narrow.f16_to_wide(words.view(np.uint16), wide, wide.view(np.uint32), self.dim)

    def narrow(self, keys: Keys, wide: Floats, words: Words, dice: Dice | None = None) -> None:
        narrow.wide_to_f16(wide, wide.view(np.uint32), words.view(np.uint16), self.dim, keys, *_thrown(dice))


class Int8(Codec):
    """Whole numbers from -127 to 127, times a step per row: its largest magnitude / 127."""

    dtype = np.dtype("i1")

    def widen(self, words: Words, wide: Floats) -> None:
        narrow.int8_to_wide(words.view(np.int8), words.view(np.float32), wide, self.dim)

    def narrow(self, keys: Keys, wide: Floats, words: Words, dice: Dice | None = None) -> None:
        arrays = wide, words.view(np.int8), words.view(np.float32)
        narrow.wide_to_int8(*arrays, self.dim, keys, *_thrown(dice))

    def arrays(self, words: Words) -> Arrays:
        return {**super().arrays(words), SCALE: words.view(np.float32)[:, 0].copy()}

    def words_of(self, arrays: Arrays) -> Words:
        words = super().words_of(arrays)
        words.view(np.float32)[:, 0] = self._checked(arrays[SCALE])
        return words

    def _checked(self, steps: Floats) -> Floats:
        is_step = (steps == 0) | ((steps >= narrow.LEAST_STEP) & (steps < np.float32(2.0**120)))
        if not is_step.all():
            raise TableError(f"expected steps of int8 rows of 0 or from 2^-100 to 2^120, found {steps[~is_step][0]}")
        return steps

    def _values(self, words: Words) -> npt.NDArray[Any]:
        return words.view(np.int8)[:, 4 : 4 + self.dim]


class LearnedInt8(Int8):
    """As Int8, with a step per row that is learned with the values: ALPT (Li et al. 2022, arXiv 2212.05735).

    The paper computes the gradient of the step in a second backward pass. Here the change that the rule has made to the
    values stands for the gradient times its rate.
    """

    def __init__(self, name: str, dim: int, rate: float) -> None:
        super().__init__(name, dim)
        self._rate = np.float32(rate)

    def update(self, keys: Keys, before: Floats, wide: Floats, words: Words, dice: Dice) -> None:
        arrays = before, wide, words.view(np.int8), words.view(np.float32)
        narrow.learn_steps(*arrays, self.dim, self._rate, keys, dice.stream, np.uint64(dice.update))

    def narrow(self, keys: Keys, wide: Floats, words: Words, dice: Dice | None = None) -> None:
        assert dice is None, "learned steps are changed by `update`"
        self._set(wide, words, np.float32(0))

    def begin(self, keys: Keys, wide: Floats, words: Words) -> None:
        self._set(wide, words, FIRST_STEP)

    def _set(self, wide: Floats, words: Words, least: np.float32) -> None:
        steps = words.view(np.float32)
        narrow.first_steps(wide, steps, self.dim, least, FIRST_STEP)
        narrow.wide_to_steps(wide, words.view(np.int8), steps, self.dim)

    def _checked(self, steps: Floats) -> Floats:
        if (steps == 0).any():
            raise TableError("expected a positive learned step of every row, found 0")
        return super()._checked(steps)


_CODECS: dict[str, Callable[[str, int], Codec]] = {"bfloat16": BFloat16, "float16": Float16, "int8": Int8}


def codec_of(name: str, dim: int) -> Codec:
    """The codec of a type that is not float32."""
    return _CODECS[name](name, dim)


def stored_codec(row_format: RowFormat, dim: int) -> Codec | None:
    """The codec by which a table stores its values; None for float32."""
    if row_format.step == "learned":
        return LearnedInt8("int8", dim, row_format.step_rate)
    return codec_of(row_format.dtype, dim) if row_format.is_narrow else None
