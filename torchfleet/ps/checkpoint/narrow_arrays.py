"""Rows of narrow values in part files, and the float32 rows that they stand for.

A part of rows has `rows` (values and state, float32), or `row_values` (bfloat16, float16 or int8), for int8 `scale`
(the step of each row), and `row_state` (float32) if there is state. The array itself shows its type, so the saves of a
chain may have different types.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.checkpoint.part_file import NARROW_TYPES, Arrays
from torchfleet.ps.tables.rows.codecs import SCALE, codec_of

NARROW = ("row_values", SCALE, "row_state")


def dtype_of(arrays: Arrays) -> str:
    """The type of the values of these rows."""
    return NARROW_TYPES[arrays["row_values"].dtype] if "row_values" in arrays else "float32"


def widened(arrays: Arrays) -> Arrays:
    """The arrays with float32 `rows` in place of narrow ones. Raises TableError for NaN, infinity or a wrong step."""
    if "row_values" not in arrays:
        return arrays
    values = arrays["row_values"]
    codec = codec_of(dtype_of(arrays), values.shape[1])
    wide = np.empty(values.shape, np.float32)
    codec.widen(codec.words_of(arrays), wide)
    state = arrays.get("row_state", np.empty((len(values), 0), np.float32))
    others = {name: array for name, array in arrays.items() if name not in NARROW}
    return {**others, "rows": np.concatenate([wide, state], axis=1)}
