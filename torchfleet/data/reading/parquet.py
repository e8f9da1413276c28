"""Parquet files: their columns as slots, read in pieces of some thousand rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.data.arrow_columns import ColumnReader, first_line, pyarrow, slots_of
from torchfleet.data.column_samples import Column, ColumnSamples, Lists
from torchfleet.data.reading.formats import LineSource
from torchfleet.data.reading.streams import is_local, open_raw
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.slots import SampleLayout, Slot
from torchfleet.ps.kernels import batches

ROWS = 1 << 15  # approximate number in a piece


@dataclass(frozen=True)
class ParquetFormat:
    """Files are Parquet. A slot has the values of the column of its name, or of what `columns` says.

    columns     slot → its column, or the columns that it joins side by side
    fill_null   the number that replaces a null; None: a null is an error. A null list always becomes an empty one
    shuffle     for a QueueDataset: number of samples that are collected and shuffled; 0: the order of the files
    seed        of the shuffle; with it, every run has the same order
    """

    columns: Mapping[str, str | Sequence[str]] | None = None
    fill_null: float | None = None
    shuffle: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if type(self.shuffle) is not int or self.shuffle < 0:
            raise DataError(f"shuffle: expected a number of samples, or 0 for none, found {self.shuffle!r}")
        if self.fill_null is not None and not math.isfinite(self.fill_null):
            raise DataError(f"fill_null: expected a finite number, found {self.fill_null!r}")

    def columns_for(self, slots: Sequence[Slot]) -> ColumnReader:
        """The reader that fills these slots. Raises DataError if they do not fit."""
        return ColumnReader(slots, self.columns or {}, self.fill_null)


class ParquetReader:
    """Reads one file after another. Used by one thread."""

    def __init__(self, options: ParquetFormat, layout: SampleLayout, is_over: Callable[[], bool]) -> None:
        pyarrow()  # raises now if it is missing
        self._layout, self._is_over = layout, is_over
        self._columns = options.columns_for(layout.slots)

    def source(self, path: str) -> LineSource:
        """The source of a file, for errors; nothing is skipped."""
        return LineSource(path, skip=False)

    def samples(self, path: str, batch_size: int = 1) -> Iterator[ColumnSamples]:
        """The file's samples, some at a time: a multiple of the batch size, wherever the file allows it."""
        num_rows = 0
        with _Opened(path) as file:
            self._columns.check_names(file.schema_arrow.names, path)
            size = -(-ROWS // batch_size) * batch_size
            for batch in _pieces(file, path, size, self._columns.names):
                if self._is_over():
                    return
                yield self._columns.samples(batch, path, num_rows)
                num_rows += batch.num_rows

    def read(self, path: str, source: LineSource) -> Iterator[SampleRows]:
        """The same samples as rows of words, as an InMemoryDataset keeps them."""
        for samples in self.samples(path):
            yield _rows_of(samples, self._layout)


def parquet_slots(path: str) -> list[Slot]:
    """A slot for every column of the file."""
    with _Opened(path) as file:
        return slots_of(file.schema_arrow, path)


class _Opened:
    """A file opened for pyarrow; closed at the end."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> Any:
        # Arrow opens local files itself, and reads them without holding the GIL.
        self._stream = None if is_local(self._path) else open_raw(self._path)
        try:
            self._file = pyarrow().parquet.ParquetFile(self._stream or self._path)
        except _errors() as error:
            if self._stream is not None:
                self._stream.close()
            raise DataError(f"{self._path}: not a Parquet file that can be read ({first_line(error)})") from error
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._stream is not None:
            self._stream.close()


def _pieces(file: Any, path: str, size: int, names: list[str]) -> Iterator[Any]:
    try:
        yield from file.iter_batches(batch_size=size, columns=names, use_threads=False)
    except NotImplementedError as error:  # of Arrow
        raise DataError(
            f"{path}: this version of Arrow cannot read the columns {', '.join(names)} ({first_line(error)}); this "
            "does not mean that the file is damaged. It reads dictionaries within lists from files of one row group "
            "only: write plain values, or one row group"
        ) from error
    except _errors() as error:
        place = _damaged(file, names)
        raise DataError(f"{path}{place}: cannot be read ({first_line(error)}); is it cut off or damaged?") from error


def _damaged(file: Any, names: list[str]) -> str:
    """The first row group and column that cannot be read, for an error; empty if all can be read."""
    try:
        for group in range(file.num_row_groups):
            for name in names:
                try:
                    file.read_row_group(group, columns=[name], use_threads=False)
                except _errors():
                    return f", row group {group}, column '{name}'"
    except _errors():  # the file is gone
        pass
    return ""


def _errors() -> tuple[type[Exception], ...]:
    """What Arrow raises for a file that it cannot read."""
    return (OSError, ValueError, MemoryError, pyarrow().ArrowException)


def _rows_of(samples: ColumnSamples, layout: SampleLayout) -> SampleRows:
    """A copy of the samples as rows of words, slot after slot."""
    columns = [_words(samples.columns[slot.name]) for slot in layout.slots]
    lengths = np.zeros(samples.num, np.int64)
    for (_, bounds), dim in zip(columns, layout.dims, strict=True):
        lengths += np.diff(bounds) + (dim < 0)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    words, ats = np.empty(starts[-1], np.uint32), starts[:-1].copy()
    for (values, bounds), dim, size in zip(columns, layout.dims, layout.sizes, strict=True):
        batches.put_slot(values, bounds, dim < 0, size, ats, words)
    return SampleRows(words, starts)


def _words(column: Column) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """A slot's values as words, and the offsets of the samples; one offset more than there are samples."""
    values, offsets = column if isinstance(column, Lists) else (column, None)
    words = np.ascontiguousarray(values.numpy()).reshape(-1).view(np.uint32)
    size = values.element_size() // 4
    if offsets is None:
        return words, np.arange(len(values) + 1) * (values.shape[1] * size)
    return words, offsets * size
