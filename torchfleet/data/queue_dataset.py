"""Batches that are read from files during training: QueueDataset, and FileBatches for torch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch.utils.data

from torchfleet.base.errors import DataError
from torchfleet.data.column_cutter import ColumnCutter
from torchfleet.data.column_samples import ColumnSamples
from torchfleet.data.dataset import BatchIterator, Dataset, DatasetPass, SharedFileQueue, file_shard
from torchfleet.data.feed import Feed
from torchfleet.data.file_passes import (
    Account,
    BatchCutter,
    Cutter,
    FileBatch,
    FileQueue,
    OwnFileQueue,
    Reading,
    SampleReader,
)
from torchfleet.data.reading.formats import LineSource
from torchfleet.data.reading.parquet import ParquetFormat, ParquetReader
from torchfleet.data.reading.reader import ReadOptions
from torchfleet.data.reading.streams import check_files
from torchfleet.data.slots import Batch, Slot

LEASE = 30.0  # seconds of silence after which a worker's files go to others


class QueueDataset(Dataset):
    """Reads its files again in every pass, and keeps a few batches in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._dynamic: tuple[str, float] | None = None
        self._num_passes = 0
        self._account: Account | None = None  # of the present pass, or the last one
        self._num_samples: int | None = None  # of a whole pass over these files
        self._sizes: dict[str, int] | None = None  # bytes by file; empty: unknown

    def set_filelist(
        self, files: Sequence[str], dynamic: bool = False, name: str = "files", lease: float = LEASE
    ) -> None:
        """The files of this worker; with `dynamic`, the files of all workers, which take them one after another.

        `name` distinguishes the dynamic lists of a job. If a worker is silent for `lease` seconds, its files go to
        others.
        """
        if not isinstance(lease, (int, float)) or not 0.1 <= lease <= 86400:
            raise DataError(f"lease: expected 0.1 to 86400 seconds, found {lease!r}")
        super().set_filelist(files)
        self._account = self._num_samples = self._sizes = None
        self._dynamic = (name, float(lease)) if dynamic else None

    def iterate(self) -> BatchIterator:
        settings = self.settings
        files: FileQueue
        if self._dynamic is not None and self.filelist:
            workers = self.workers()
            shared = workers.files(self._dynamic[0], self.filelist, self._dynamic[1])
            files, at_end = _Settled(shared, self), shared.close
        else:
            files, at_end = OwnFileQueue(self.filelist), lambda: None
        num_threads = min(self.thread_num, max(1, len(self.filelist)))
        account = self._account = Account()
        reading: Reading[Any] = Reading(files, self._cutter_of_pass(), self.drop_last, num_threads, account)
        readers = [self._reader(settings, reading.closing.is_set) for _ in range(num_threads)]
        feed = Feed([partial(reading.run, reader) for reader in readers], self._queue_size, reading.closing)

        def report() -> None:
            self.num_skipped = account.num_skipped
            if account.is_complete and self._dynamic is None:
                self._num_samples = sum(account.num_samples.values())
            account.report()

        return BatchIterator(DatasetPass(feed, at_end, report, (lambda: reading.is_held) if self.is_shared else None))

    @property
    def is_shared(self) -> bool:
        return self._dynamic is not None

    @property
    def num_samples(self) -> int | None:
        """The number of samples of a pass on this worker, from the previous pass.

        In the first pass it is an estimate from the sizes of the files in bytes. None before one file was read to the
        end, and for files that are shared with other workers."""
        found = self._num_samples
        if found is None and self._account is not None and self._dynamic is None:
            if self._sizes is None:
                self._sizes = _sizes(self.filelist)
            found = _estimate(self._sizes, dict(self._account.num_samples))
        if found is None or not self.drop_last:
            return found
        return found // self.batch_size * self.batch_size

    def _reader(self, settings: ReadOptions, is_over: Callable[[], bool]) -> SampleReader[Any]:
        reader = settings.reader(self._layout, is_over)
        return ColumnsOf(reader, self.batch_size) if isinstance(reader, ParquetReader) else reader

    def _cutter_of_pass(self) -> Callable[[Callable[[FileBatch], None]], BatchCutter[Any]]:
        """A function that makes a cutter for each thread of a pass."""
        form = self.settings.data_format
        if not isinstance(form, ParquetFormat):
            return lambda put: Cutter(self._layout, self.batch_size, put)
        self._num_passes += 1
        seeds = np.random.SeedSequence(form.seed if form.seed is None else [form.seed, self._num_passes])
        return lambda put: ColumnCutter(self.batch_size, put, form.shuffle, np.random.default_rng(seeds.spawn(1)[0]))


def _sizes(paths: Sequence[str]) -> dict[str, int]:
    try:
        return {path: os.path.getsize(path) for path in paths}
    except OSError:  # a URL: its size would take a request
        return {}


def _estimate(sizes: Mapping[str, int], num_samples: Mapping[str, int]) -> int | None:
    """The number of samples, if all files have as many per byte as those that were read; None while unknown."""
    known = sum(sizes.get(path, 0) for path in num_samples)
    return round(sum(num_samples.values()) * sum(sizes.values()) / known) if known else None


class ColumnsOf:
    """A reader of Parquet whose samples stay columns, and become batches without a conversion to rows."""

    def __init__(self, reader: ParquetReader, batch_size: int) -> None:
        self.source, self._reader, self._batch_size = reader.source, reader, batch_size

    def read(self, path: str, source: LineSource) -> Iterator[ColumnSamples]:
        return self._reader.samples(path, self._batch_size)


class _Settled:
    """A shared file queue that reports a file as done when the servers have the gradients of all its samples."""

    def __init__(self, files: SharedFileQueue, dataset: Dataset) -> None:
        self._files, self._dataset = files, dataset

    def take(self) -> str | None:
        return self._files.take()

    def done(self, path: str) -> None:
        self._dataset.settle()
        self._files.done(path)


class FileBatches(torch.utils.data.IterableDataset[Batch]):
    """Yields whole batches: use DataLoader(..., batch_size=None). With num_workers, each process reads its share."""

    def __init__(
        self,
        files: Sequence[str],
        batch_size: int = 1,
        use_var: Sequence[Slot] = (),
        pipe_command: Any = None,
        data_format: Any = None,
        on_bad_line: str = "error",
        drop_last: bool = False,
    ) -> None:
        self._files = check_files(files)
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "use_var": list(use_var),
            "pipe_command": pipe_command,
            "data_format": data_format,
            "on_bad_line": on_bad_line,
            "drop_last": drop_last,
        }
        QueueDataset().init(**self._options)  # raises for wrong options here, not in a DataLoader's process

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        dataset = QueueDataset()
        dataset.init(**self._options)
        dataset.set_filelist(self._files if info is None else file_shard(self._files, info.id, info.num_workers))
        for batch in dataset:
            yield Batch(dict(batch), batch.num_samples)
