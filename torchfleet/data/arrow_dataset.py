"""ArrowDataset: batches from any stream of Arrow record batches, such as Ray Data's or a query's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from torchfleet.base.errors import DataError
from torchfleet.data.arrow_columns import ColumnReader, first_line, pyarrow, slots_of
from torchfleet.data.column_cutter import ColumnCutter
from torchfleet.data.dataset import BatchIterator, Dataset, DatasetPass, checked
from torchfleet.data.feed import Feed
from torchfleet.data.file_passes import FileBatch
from torchfleet.data.reading.parquet import ParquetFormat
from torchfleet.data.slots import SampleLayout, Slot

_QUEUED = 4  # finished batches in the queue, at most


class ArrowDataset(Dataset):
    """`set_stream` replaces `init` and `set_filelist`. One thread reads; batches are in the order of the stream."""

    def set_stream(
        self,
        make_stream: Callable[[], Iterable[Any]],
        batch_size: int,
        use_var: Sequence[Slot] | None = None,
        form: ParquetFormat | None = None,
        drop_last: bool = False,
        name: str = "the stream",
    ) -> None:
        """`make_stream` is called in every pass and returns record batches or tables. `name`: for errors."""
        self._form, self._make_stream, self._name, self._num_passes = form or ParquetFormat(), make_stream, name, 0
        self._slots = None if use_var is None else SampleLayout(list(use_var)).slots
        if self._slots is not None:
            self._form.columns_for(self._slots)
        elif self._form.columns is not None:
            raise DataError("columns says what fills which slot: name the slots in use_var, too")
        self.batch_size, self.drop_last = checked("batch_size", batch_size), drop_last

    def _set(self, name: str, value: Any) -> None:
        raise DataError(f"{name} of record batches: give it to fleet.data.from_arrow or from_ray")

    def iterate(self) -> BatchIterator:
        if not hasattr(self, "_make_stream"):
            raise DataError("call dataset.set_stream(...) first, or make it with fleet.data.from_arrow")
        self._num_passes += 1
        seed = None if self._form.seed is None else [self._form.seed, self._num_passes]
        stream, rng = iter(self._make_stream()), np.random.default_rng(seed)

        def make(put: Callable[[FileBatch], None]) -> None:
            cutter, num_rows = ColumnCutter(self.batch_size, put, self._form.shuffle, rng), 0
            for batch in _record_batches(stream, self._name):
                cutter.add(self._columns(batch.schema).samples(batch, self._name, num_rows))
                num_rows += batch.num_rows
            cutter.drop() if self.drop_last else cutter.cut()

        return BatchIterator(DatasetPass(Feed([make], _QUEUED), lambda: None, lambda: None))

    def _columns(self, schema: Any) -> ColumnReader:
        if self._slots is None:  # all record batches have the columns of the first
            self._slots = tuple(slots_of(schema, self._name))
        return self._form.columns_for(self._slots)


def stream_of(source: Any) -> Callable[[], Iterable[Any]]:
    """A function that restarts the stream of a pyarrow Dataset, Table, RecordBatch or reader, or of any iterable.

    If the source can be iterated only once, the second pass is an error.
    """
    pa = pyarrow()
    if isinstance(source, (pa.Table, pa.RecordBatch)):
        return lambda: [source]
    if hasattr(source, "to_batches"):  # pyarrow.dataset.Dataset, or a Scanner of it
        return source.to_batches  # type: ignore[no-any-return]
    if callable(source):
        return source  # type: ignore[no-any-return]
    if not isinstance(source, Iterable):
        raise DataError(
            f"from_arrow: expected record batches of pyarrow, a Dataset or Table of it, or a function that makes them; "
            f"found {type(source).__name__}"
        )
    return _Once(source) if iter(source) is source else lambda: source


class _Once:
    """A stream that cannot be restarted."""

    def __init__(self, stream: Iterable[Any]) -> None:
        self._stream: Iterable[Any] | None = stream

    def __call__(self) -> Iterable[Any]:
        stream, self._stream = self._stream, None
        if stream is None:
            raise DataError(
                "this stream of record batches can be iterated only once, and a pass has already used it: give "
                "from_arrow a function that makes it, or a list"
            )
        return stream


def _record_batches(stream: Iterator[Any], name: str) -> Iterator[Any]:
    pa = pyarrow()
    for found in _without_arrow_errors(stream, name):
        if isinstance(found, pa.Table):
            yield from _batches_of(found, name)
        elif isinstance(found, pa.RecordBatch):
            yield found
        else:
            raise DataError(f"{name}: expected record batches or tables of pyarrow, found {type(found).__name__}")


def _without_arrow_errors(stream: Iterator[Any], name: str) -> Iterator[Any]:
    """The stream, with errors of Arrow, such as those of a reader of a damaged IPC stream, as DataError.

    Arrow raises OSError for offsets outside of a file.
    """
    num = 0
    try:
        for found in stream:
            yield found
            num += 1
    except NotImplementedError as error:  # of Arrow
        why = f"this version of Arrow cannot read record batch {num} ({first_line(error)})"
        raise DataError(f"{name}: {why}; this does not mean that the data is damaged") from error
    except (OSError, pyarrow().ArrowException) as error:
        why = f"record batch {num} cannot be read ({first_line(error)})"
        raise DataError(f"{name}: {why}; is it cut off or damaged?") from error


def _batches_of(table: Any, name: str) -> list[Any]:
    try:
        table.validate()
    except pyarrow().ArrowException as error:
        raise DataError(f"{name}: expected a valid table of Arrow, found {first_line(error)}") from error
    return list(table.to_batches())
