"""Raw columns, as programs have them before training: strings or numbers, and which of them are missing."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.ps.worker.batch.string_ids import are_strings, is_arrow, is_string_type

_KINDS = "an array of numpy or pyarrow, or a list, of numbers or strings"


class RawColumn(NamedTuple):
    """`values`: strings, as hash_strings takes them, or an array of numbers; None: all are missing. Where the mask
    `is_missing` is set, they mean nothing. None: no value is missing.
    """

    values: Any
    are_strings: bool
    is_missing: npt.NDArray[np.bool_] | None
    shape: tuple[int, ...]


def raw_column(column: Any, name: str) -> RawColumn:
    """An array of numpy or pyarrow, a list, a Series of pandas, ... Raises DataError, which names the column."""
    if is_arrow(column):
        return _of_arrow(column, name)
    if isinstance(column, np.ma.MaskedArray):
        found = raw_column(column.data, name)
        is_missing = np.ma.getmaskarray(column) | (False if found.is_missing is None else found.is_missing)
        return found._replace(is_missing=is_missing)
    try:
        array = np.asarray(column)
    except ValueError:  # lists of different lengths
        raise DataError(f"column '{name}': expected lists of one length, or none, found lists of several") from None
    if array.dtype.kind == "U" and isinstance(column, (list, tuple)):
        array = np.asarray(column, dtype=object)  # numpy has made text of numbers and nulls among the strings
    return (
        _of_objects(array, name) if array.dtype.kind == "O" else RawColumn(array, are_strings(array), None, array.shape)
    )


def _of_arrow(column: Any, name: str) -> RawColumn:
    """Nulls are filled: numpy would make floats of whole numbers with a null."""
    from torchfleet.data.arrow_columns import decoded, filled, pyarrow

    types, shape = pyarrow().types, (len(column),)
    array = decoded(column.combine_chunks() if hasattr(column, "chunks") else column)
    is_missing = np.asarray(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None
    if types.is_null(array.type):
        return RawColumn(None, False, np.ones(shape, np.bool_), shape)
    if is_string_type(array.type):
        return RawColumn(array if is_missing is None else filled(array, ""), True, is_missing, shape)
    if types.is_integer(array.type) and is_missing is not None:
        array = filled(array, 0)
    elif not (types.is_integer(array.type) or types.is_floating(array.type)):
        raise DataError(f"column '{name}': expected {_KINDS}; found pyarrow's {array.type}")
    return RawColumn(array.to_numpy(zero_copy_only=False), False, is_missing, shape)


def _of_objects(array: npt.NDArray[Any], name: str) -> RawColumn:
    """Python's strings or numbers, with nulls among them."""
    flat = array.reshape(-1).tolist()
    are_null = [_is_null(one) for one in flat]
    is_missing = np.array(are_null, np.bool_).reshape(array.shape) if any(are_null) else None
    if flat and all(are_null):
        return RawColumn(None, False, is_missing, array.shape)
    if any(isinstance(one, (str, bytes)) for one in flat):
        filled = flat if is_missing is None else ["" if null else one for one, null in zip(flat, are_null, strict=True)]
        strings = np.empty(len(flat), object)
        strings[:] = filled
        return RawColumn(strings.reshape(array.shape), True, is_missing, array.shape)
    given = [0 if null else one for one, null in zip(flat, are_null, strict=True)]
    try:
        numbers = np.array(given)
    except ValueError:
        numbers = np.empty(0, object)
    if numbers.shape != (len(flat),) or numbers.dtype.kind not in "iufb":
        found = next((one for one in flat if not isinstance(one, (int, float))), None)
        raise DataError(f"column '{name}': expected {_KINDS}; found {type(found).__name__} in it: {found!r:.40}")
    return RawColumn(numbers.reshape(array.shape), False, is_missing, array.shape)


def _is_null(one: Any) -> bool:
    """None, nan, and pandas' NA and NaT."""
    if isinstance(one, (float, np.floating)):
        return bool(np.isnan(one))
    return one is None or type(one).__name__ in ("NAType", "NaTType")
