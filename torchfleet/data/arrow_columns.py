"""Arrow columns as slots. Strings become ids, by fleet.hash_strings. Values that already have the slot's dtype are not
copied: tensors view Arrow's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.base.errors import DataError
from torchfleet.base.extras import required
from torchfleet.data.column_samples import Column, ColumnSamples, Lists
from torchfleet.data.slots import DTYPES, Slot
from torchfleet.ps.worker.batch.string_ids import VIEWS, are_strings, hash_strings, is_string_type

_INTEGERS = {np.dtype(np.int64): "integers or strings", np.dtype(np.float32): "numbers"}


def pyarrow() -> Any:
    """The module, with its compute and Parquet modules loaded. Raises MissingPackage."""
    for module in ("pyarrow.compute", "pyarrow.parquet"):
        required(module, "data in columns", "parquet")
    return required("pyarrow", "data in columns", "parquet")


class ColumnReader:
    """Converts record batches to samples: which columns fill which slot, and what replaces a null."""

    def __init__(
        self, slots: Sequence[Slot], columns: Mapping[str, str | Sequence[str]], fill_null: float | None
    ) -> None:
        unknown = set(columns) - {slot.name for slot in slots}
        if unknown:
            known = ", ".join(slot.name for slot in slots)
            raise DataError(f"columns: there is no slot '{min(unknown)}' in use_var; it has {known}")
        self._sources = {slot: _names(slot, columns.get(slot.name, slot.name)) for slot in slots}
        self._fill_null = fill_null
        self.names = list(dict.fromkeys(name for names in self._sources.values() for name in names))

    def check_names(self, found: Sequence[str], where: str) -> None:
        """Raise DataError if a column is missing."""
        for slot, names in self._sources.items():
            for name in names:
                if name not in found:
                    there = ", ".join(found) or "none"
                    raise DataError(f"{where}: expected a column '{name}' for slot '{slot.name}', found {there}")

    def _check_memory(self, batch: Any, where: str, first_row: int) -> None:
        """Raise DataError for a column whose buffers are too short, or whose offsets or indices point outside them."""
        for name in self.names:
            try:
                column = batch.column(name)
                column.validate(full=True)
                if len(column) != batch.num_rows:
                    raise ValueError(f"{len(column):,} values in a record batch of {batch.num_rows:,} rows")
            except (ValueError, KeyError, pyarrow().ArrowException) as error:
                raise DataError(
                    f"{where}, column '{name}', the record batch from row {first_row}: expected an array that Arrow "
                    f"takes for valid, found {first_line(error)}. Make the data anew"
                ) from error

    def samples(self, batch: Any, where: str, first_row: int = 0) -> ColumnSamples:
        """The samples of a record batch. `where` and `first_row` are for errors.

        Raises DataError if a column is not a valid Arrow array: lengths, offsets and indices are checked before any
        value is read, because invalid ones would lead to reads outside of Arrow's memory.
        """
        self.check_names(_names_in(batch, where), where)
        self._check_memory(batch, where, first_row)
        made: dict[str, Column] = {}
        for slot, names in self._sources.items():
            own = slot if len(names) == 1 else replace(slot, dim=1)  # several columns stand side by side
            found: list[Any] = [
                _Column(batch.column(name), own, name, where, first_row, self._fill_null).slot_values()
                for name in names
            ]
            made[slot.name] = found[0] if len(names) == 1 else torch.cat(found, 1)
        return ColumnSamples(made, batch.num_rows)


def _names_in(batch: Any, where: str) -> list[str]:
    try:
        return list(batch.schema.names)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected names of columns in UTF-8, found {error.object[:40]!r}") from error


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def slots_of(schema: Any, where: str) -> list[Slot]:
    """A slot for every column: numbers have `dim=1`, lists any number of values, fixed-size lists their size."""
    types = pyarrow().types
    slots = []
    for field in schema:
        kind = _stored(field.type)
        dim: int | None = 1
        if types.is_fixed_size_list(kind):
            kind, dim = kind.value_type, kind.list_size
        elif types.is_list(kind) or types.is_large_list(kind):
            kind, dim = kind.value_type, None
        kind = _stored(kind)
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or is_string_type(kind)):
            raise DataError(
                f"{where}, column '{field.name}': expected numbers or strings, or lists of them, found {field.type}. "
                "Name the slots that you want in use_var, or leave the column out."
            )
        slots.append(Slot(field.name, "float32" if types.is_floating(kind) else "int64", dim))
    return slots


class _Column:
    """One column of a record batch, to be converted into a slot."""

    def __init__(self, array: Any, slot: Slot, name: str, where: str, first_row: int, fill_null: float | None) -> None:
        self._array, self.slot, self._fill_null = decoded(array), slot, fill_null
        self._found, self._where, self._first_row = array.type, f"{where}, column '{name}'", first_row
        self.dtype = DTYPES[slot.dtype]

    def slot_values(self) -> Column:
        types, kind, dim = pyarrow().types, self._array.type, self.slot.dim
        if types.is_fixed_size_list(kind):
            size = kind.list_size
            self._check_nulls(self._array, "lists of a fixed size")
            values = self._values(self._array.flatten())
            offsets = np.arange(len(self._array) + 1) * size
        elif types.is_list(kind) or types.is_large_list(kind):
            values, offsets = self._lists()
        elif dim == 1:
            return self._values(self._array).view(-1, 1)
        else:
            values, offsets = self._values(self._array), np.arange(len(self._array) + 1)
            if dim is not None:
                raise self._error(f"expected lists of {dim} values for slot '{self.slot.name}'")
        if dim is None:
            return Lists(values, offsets)
        wrong = np.flatnonzero(np.diff(offsets) != dim)
        if len(wrong):
            found = int(offsets[wrong[0] + 1] - offsets[wrong[0]])
            raise self._error(f"expected {dim} values for slot '{self.slot.name}'", int(wrong[0]), f"{found} values")
        return values.view(-1, dim)

    def _lists(self) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """Values and offsets. A null list becomes an empty one; Arrow's values under a null are skipped."""
        array = self._array
        if array.null_count:
            lengths = pyarrow().compute.fill_null(pyarrow().compute.list_value_length(array), 0)
            offsets = np.concatenate(([0], np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)))
            return self._values(array.flatten()), offsets
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        inner = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        return self._values(inner), offsets - offsets[0] if offsets[0] else offsets

    def _values(self, array: Any) -> torch.Tensor:
        """Numbers in the slot's dtype: a view of Arrow's memory if they already have it."""
        if self.dtype == np.int64 and are_strings(array):
            return self._hashed(array)
        pa, array = pyarrow(), decoded(array)
        kind, wanted = array.type, pa.int64() if self.dtype == np.int64 else pa.float32()
        is_number = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        if not is_number and not (self.dtype == np.float32 and pa.types.is_floating(kind)):
            raise self._error(f"expected {_INTEGERS[self.dtype]} for slot '{self.slot.name}' ({self.slot.dtype})")
        if array.null_count and self._fill_null is None:
            self._check_nulls(array, f"{_INTEGERS[self.dtype]} for slot '{self.slot.name}'")
        if not kind.equals(wanted) and not (kind.equals(pa.uint64()) and self.dtype == np.int64):
            array = array.cast(wanted, safe=False)
        if array.null_count:
            array = array.fill_null(pa.array([self._filled()], wanted).view(array.type)[0])
        values = _tensor(array, self.dtype)
        if self.dtype == np.float32 and not math.isfinite(float(values.sum(dtype=torch.float64))):
            raise self._error(f"expected finite numbers for slot '{self.slot.name}'", None, "nan or inf")
        return values

    def _hashed(self, array: Any) -> torch.Tensor:
        """Ids of strings; `fill_null` is the id of a null."""
        if self._fill_null is None:
            self._check_nulls(array, f"strings or integers for slot '{self.slot.name}'")
        is_null = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        try:
            ids = hash_strings(array if is_null is None else filled(array, ""))
        except DataError as error:
            raise self._error(str(error)) from error
        if is_null is not None:
            ids[is_null] = self._filled()
        return torch.from_numpy(ids)

    def _filled(self) -> int | float:
        """`fill_null` as a value of the slot. Raises DataError if the slot has ids and it is not one."""
        assert self._fill_null is not None
        if self.dtype == np.float32:
            return float(self._fill_null)
        if self._fill_null != int(self._fill_null) or not -(1 << 63) <= self._fill_null < 1 << 63:
            raise self._error(
                f"expected a whole number of 64 bits as fill_null for slot '{self.slot.name}' ({self.slot.dtype})",
                found=f"a null, and fill_null={self._fill_null!r}",
            )
        return int(self._fill_null)

    def _check_nulls(self, array: Any, expected: str) -> None:
        if array.null_count:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            at = row if array is self._array else None  # inside lists it is not a row number
            raise self._error(
                f"expected {expected}", at, "a null. fill_null=0 reads nulls as 0; or leave such rows out before"
            )

    def _error(self, expected: str, row: int | None = None, found: str = "") -> DataError:
        place = self._where if row is None else f"{self._where}, row {self._first_row + row}"
        return DataError(f"{place}: {expected}, found {found or self._found}")


def _names(slot: Slot, given: str | Sequence[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"columns['{slot.name}']: expected the name of a column, or a list of them, found {given!r}")
    if len(names) > 1 and slot.dim != len(names):
        raise DataError(
            f"columns['{slot.name}'] names {len(names)} columns, and the slot has dim={slot.dim}: give it "
            f"dim={len(names)}"
        )
    return names


def _stored(kind: Any) -> Any:
    """The type of the numbers behind extension and dictionary types."""
    pa = pyarrow()
    while isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return kind


def decoded(array: Any) -> Any:
    """The array without extension and dictionary types."""
    pa = pyarrow()
    while isinstance(array, pa.ExtensionArray) or pa.types.is_dictionary(array.type):
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
            continue
        if str(array.type.value_type) in VIEWS:  # Arrow cannot take views of strings by their places
            words = array.dictionary.cast(VIEWS[str(array.type.value_type)])
            array = pa.DictionaryArray.from_arrays(array.indices, words)
        array = array.dictionary_decode()
    return array


def filled(array: Any, value: Any) -> Any:
    """The array with `value` for its nulls. Arrow has no fill_null for views of strings, which become plain strings."""
    pa = pyarrow()
    if str(array.type) in VIEWS:
        array = array.cast(VIEWS[str(array.type)])
    return array.fill_null(pa.scalar(value).cast(array.type))


class _Memory:
    """Arrow's memory in numpy's interface.

    It is not marked as read-only, because torch would then warn in every batch. docs/data.md says that batches must not
    be written to."""

    def __init__(self, array: Any, dtype: np.dtype[Any]) -> None:
        self._kept = array.buffers()[1]
        address = self._kept.address + array.offset * dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (len(array),),
            "typestr": dtype.str,
        }


def _tensor(array: Any, dtype: np.dtype[Any]) -> torch.Tensor:
    if not len(array):
        return torch.from_numpy(np.empty(0, dtype))
    return torch.from_numpy(np.asarray(_Memory(array, dtype)))
