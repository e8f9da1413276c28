"""The type of the numbers of a table's rows: on the servers and in saves, and on the network."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from torchfleet.base.errors import TableError

Dtype = Literal["float32", "bfloat16", "float16", "int8"]
Step = Literal["row", "learned"]
DTYPES: tuple[str, ...] = get_args(Dtype)
STEPS: tuple[str, ...] = get_args(Step)
STEP_RATE = 0.003
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise TableError(text)


class RowFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`dtype`: of the values on the servers and in saves; the rule computes in float32, and its state is float32.
    `step`, for int8: the largest magnitude of a row / 127 ("row"), or one per row that is learned (at `step_rate`).
    `wire`: the type in which values are pulled and gradients pushed; "": values as they are stored, gradients float32.
    """

    dtype: str = "float32"
    step: str = "row"
    step_rate: float = STEP_RATE
    wire: str = ""

    def __post_init__(self) -> None:
        _expect(self.dtype in DTYPES, f"dtype must be one of {DTYPES}, found {self.dtype!r}")
        _expect(self.step in STEPS, f"step must be one of {STEPS}, found {self.step!r}")
        _expect(self.wire in ("", *DTYPES), f"wire must be one of {DTYPES}, found {self.wire!r}")
        _expect(
            self.step == "row" or self.dtype == "int8",
            f"step={self.step!r} is for dtype='int8'; dtype is {self.dtype!r}, which has no step",
        )
        _expect(
            isinstance(self.step_rate, float) and 0 <= self.step_rate <= 1,
            f"step_rate must be a number from 0 to 1, found {self.step_rate!r}",
        )
        _expect(
            self.step == "learned" or self.step_rate == STEP_RATE,
            f"step_rate={self.step_rate!r} is for step='learned'; step is {self.step!r}",
        )

    @property
    def is_narrow(self) -> bool:
        """Whether the servers keep less than 32 bits per value."""
        return self.dtype != "float32"

    @property
    def pulled(self) -> str:
        """The type of values in replies to pulls."""
        return self.wire or self.dtype

    @property
    def pushed(self) -> str:
        """The type of gradients in pushes: bfloat16 instead of float16, whose range is too narrow for gradients."""
        return "bfloat16" if self.wire == "float16" else self.wire or "float32"

    @property
    def is_as_stored(self) -> bool:
        """Whether a pull copies the numbers as they are stored."""
        return self.pulled == self.dtype


FLOAT32 = RowFormat()


def value_words(dtype: str, dim: int) -> int:
    """32-bit words of the values of a row; the first of an int8 row is its step."""
    return -(-dim * _ITEM_BYTES[dtype] // 4) + (dtype == "int8")


def saved_bytes(dtype: str, dim: int) -> int:
    """Bytes of the values of a row in a part file."""
    return dim * _ITEM_BYTES[dtype] + 4 * (dtype == "int8")
