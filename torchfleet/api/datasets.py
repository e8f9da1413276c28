"""Datasets of a job: those of torchfleet.data, connected to the job's other workers."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec

from torchfleet.api import process_role, table_calls
from torchfleet.base.errors import DataError
from torchfleet.data.arrow_dataset import ArrowDataset, stream_of
from torchfleet.data.dataset import BatchIterator, WorkerGroup
from torchfleet.data.memory_dataset import InMemoryDataset as _InMemoryDataset
from torchfleet.data.queue_dataset import QueueDataset as _QueueDataset
from torchfleet.data.ray_streams import stream_of_worker
from torchfleet.data.reading.parquet import ParquetFormat, parquet_slots
from torchfleet.data.reading.streams import is_local
from torchfleet.data.slots import Slot

Columns = Mapping[str, str | Sequence[str]]


class InMemoryDataset(_InMemoryDataset):
    """Loads all samples first; then shuffles, exchanges and iterates over them any number of times: docs/data.md."""

    def workers(self) -> WorkerGroup:
        return process_role.workers()


class QueueDataset(_QueueDataset):
    """Reads batches directly from files during training: docs/data.md."""

    def workers(self) -> WorkerGroup:
        return process_role.workers()

    def settle(self) -> None:
        table_calls.settle()

    def iterate(self) -> BatchIterator:
        if self._dynamic is not None and process_role.mode() == "sync" and process_role.worker_num() > 1:
            raise DataError(
                "set_filelist(dynamic=True) gives workers different numbers of batches, and in sync mode every step "
                "needs all of them: use an asynchronous mode, or fleet.util.get_file_shard"
            )
        return super().iterate()


class DatasetFactory:
    """Paddle's way to make datasets before 2.0."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> InMemoryDataset | QueueDataset:
        """A new dataset of this class, "InMemoryDataset" or "QueueDataset"."""
        classes: dict[str, type[InMemoryDataset | QueueDataset]] = {
            "InMemoryDataset": InMemoryDataset,
            "QueueDataset": QueueDataset,
        }
        if datafeed_class not in classes:
            raise DataError(f"create_dataset: expected one of {', '.join(classes)}, found {datafeed_class!r}")
        return classes[datafeed_class]()


def from_parquet(
    source: str | os.PathLike[str] | Sequence[str],
    batch_size: int = 1,
    use_var: Sequence[Slot] | None = None,
    *,
    columns: Columns | None = None,
    fill_null: float | None = None,
    shuffle: int = 0,
    seed: int | None = None,
    thread_num: int = 1,
    drop_last: bool = False,
    dynamic: bool = False,
) -> QueueDataset:
    """A QueueDataset over Parquet files: a file, a folder, a URL, or a list of them. docs/data.md explains the rest.

    `dynamic`: `source` is shared by all workers, which take one file after another. Otherwise it is this worker's own.
    """
    files = _parquet_files(source)
    dataset = QueueDataset()
    dataset.init(
        batch_size=batch_size,
        thread_num=thread_num,
        use_var=parquet_slots(files[0]) if use_var is None else use_var,
        data_format=ParquetFormat(columns, fill_null, shuffle, seed),
        drop_last=drop_last,
    )
    dataset.set_filelist(files, dynamic=dynamic)
    return dataset


def from_arrow(
    source: Any,
    batch_size: int = 1,
    use_var: Sequence[Slot] | None = None,
    *,
    columns: Columns | None = None,
    fill_null: float | None = None,
    shuffle: int = 0,
    seed: int | None = None,
    drop_last: bool = False,
) -> ArrowDataset:
    """A dataset over pyarrow record batches: any iterable of them, a function that returns one, a Dataset, a Table."""
    dataset = ArrowDataset()
    form = ParquetFormat(columns, fill_null, shuffle, seed)
    dataset.set_stream(stream_of(source), batch_size, use_var, form, drop_last, "the record batches")
    return dataset


def from_ray(
    dataset: Any,
    batch_size: int = 1,
    use_var: Sequence[Slot] | None = None,
    *,
    columns: Columns | None = None,
    fill_null: float | None = None,
    shuffle: int = 0,
    seed: int | None = None,
    drop_last: bool = False,
) -> ArrowDataset:
    """A dataset over a ray.data.Dataset. Every worker of the job gets its share while the dataset is read.

    All workers must call it, after fleet.init_worker(), and iterate over it equally often.
    """
    workers = process_role.workers()
    try:
        is_sync = process_role.mode() == "sync" and process_role.worker_num() > 1
        stream, kept = stream_of_worker(dataset, workers, is_equal=is_sync)
    finally:
        workers.close()
    made = RayDataset(kept)
    form = ParquetFormat(columns, fill_null, shuffle, seed)
    made.set_stream(stream, batch_size, use_var, form, drop_last, "the dataset of Ray")
    return made


class RayDataset(ArrowDataset):
    """Keeps the actor that splits the dataset alive while this worker reads."""

    def __init__(self, keeper: Any) -> None:
        super().__init__()
        self._keeper = keeper


def _parquet_files(source: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """The files of `source`. Those of a folder are sorted by name, without hidden files."""
    if not isinstance(source, (str, os.PathLike)):
        found = list(source)
    elif is_local(path := os.fspath(source)):
        pattern = f"{glob.escape(path)}/**/*.parquet"
        found = sorted(glob.glob(pattern, recursive=True)) if os.path.isdir(path) else [path]
    else:
        found = [path] if path.endswith(".parquet") else _listed(path)
    if not found:
        raise DataError(f"no .parquet file in {source!r}")
    return found


def _listed(url: str) -> list[str]:
    try:
        files, names = fsspec.core.url_to_fs(url)
        return sorted(files.unstrip_protocol(name) for name in files.find(names) if name.endswith(".parquet"))
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: cannot be listed ({type(error).__name__}: {error})") from error
