"""InMemoryDataset: all samples are loaded first, then shuffled and iterated over any number of times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import DataError
from torchfleet.base.monitor.progress import Progress
from torchfleet.data.dataset import BatchIterator, Dataset, DatasetPass, as_numbers, check_seed, checked
from torchfleet.data.feed import Feed
from torchfleet.data.file_passes import Account, FileBatch, OwnFileQueue
from torchfleet.data.reading.parquet import ParquetFormat
from torchfleet.data.reading.reader import ReadOptions
from torchfleet.data.sample_store import Store
from torchfleet.data.shuffle import exchange_samples
from torchfleet.data.slots import RowSelection, SampleLayout


class InMemoryDataset(Dataset):
    """Samples are in the order of files and lines until they are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self._store: Store | None = None
        self._preload: _Preload | None = None
        self._num_shuffled = 0

    def load_into_memory(self) -> None:
        """Read all files, replacing the samples in memory."""
        self._require_no_preload()
        loading = self._loading(None)
        self.release_memory()
        self._replace(*loading())

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Start to read all files during training; `wait_preload_done` then replaces the present samples."""
        self._require_no_preload()
        self._preload = _Preload(self._loading(thread_num))

    def wait_preload_done(self) -> None:
        """Wait for the preload, and switch to its samples."""
        if self._preload is None:
            raise DataError("wait_preload_done: call preload_into_memory first")
        preload, self._preload = self._preload, None
        self._replace(*preload.wait())

    def local_shuffle(self, seed: int | None = None) -> None:
        """Put this worker's samples into a uniformly random order."""
        check_seed(seed)
        np.random.default_rng(seed).shuffle(self._loaded().order)

    def global_shuffle(self, seed: int | None = None) -> None:
        """Put all workers' samples into a uniformly random order, in equal shares. All workers must call it."""
        check_seed(seed)
        store = self._loaded()
        workers = self.workers()
        try:
            if workers.num > 1:
                # From the first sample sent until the last one received, this worker has no samples: an error leaves it
                # empty.
                self._store = store = exchange_samples(store, workers, seed, self.release_memory)
                seed = None if seed is None else seed + 1 + workers.index
        finally:
            workers.close()
        np.random.default_rng(seed).shuffle(store.order)
        self._num_shuffled = store.num

    def slots_shuffle(self, slots: Sequence[str], seed: int | None = None) -> None:
        """Permute the values of each of these slots among the samples; everything else stays."""
        check_seed(seed)
        store, rng = self._loaded(), np.random.default_rng(seed)
        names = [slot.name for slot in store.layout.slots]
        wanted = [slots] if isinstance(slots, str) else list(slots)
        for name in wanted:
            if name not in names:
                raise DataError(f"slots_shuffle: no slot '{name}'; there are {', '.join(names)}")
        for name in wanted:
            self._store = store = store.with_slot_shuffled(names.index(name), rng)

    def release_memory(self) -> None:
        """Drop all samples."""
        self._store = None
        self._num_shuffled = 0

    def get_memory_data_size(self, all_workers: bool = False) -> int:
        """The number of samples in memory."""
        return self._total("memory size", self._store.num if self._store is not None else 0, all_workers)

    def get_shuffle_data_size(self, all_workers: bool = False) -> int:
        """The number of samples after the last global_shuffle."""
        return self._total("shuffle size", self._num_shuffled, all_workers)

    def iterate(self) -> BatchIterator:
        store = self._loaded()
        order, size = store.order.copy(), self.batch_size  # a shuffle during a pass affects the next one
        rows = store.rows
        num = len(order) // size * size if self.drop_last else len(order)

        def make(put: Callable[[FileBatch], None]) -> None:
            for begin in range(0, num, size):
                made = store.layout.batch([RowSelection(rows, order[begin : begin + size])])
                put(FileBatch(dict(made), made.num_samples))

        store.add_reader()
        return BatchIterator(DatasetPass(Feed([make], self._queue_size), store.remove_reader, lambda: None))

    @property
    def num_samples(self) -> int | None:
        """The number of samples of a pass on this worker; None before they are loaded."""
        if self._store is None:
            return None
        return len(self) * self.batch_size if self.drop_last else self._store.num

    def __len__(self) -> int:
        """The number of batches in a pass."""
        num, size = self._loaded().num, self.batch_size
        return num // size if self.drop_last else -(-num // size)

    def _loading(self, thread_num: int | None) -> Callable[[], tuple[Store, Account]]:
        """A function that loads the files with the present settings."""
        options, paths = self.settings, list(self.filelist)
        if isinstance(options.data_format, ParquetFormat) and options.data_format.shuffle:
            raise DataError(
                f"ParquetFormat(shuffle={options.data_format.shuffle}) is for a QueueDataset: with all samples in "
                "memory use local_shuffle() or global_shuffle()"
            )
        num_threads = self.thread_num if thread_num is None else checked("thread_num", thread_num)
        return partial(_load, options, self._layout, paths, num_threads)

    def _replace(self, store: Store, account: Account) -> None:
        self._store, self.num_skipped, self._num_shuffled = store, account.num_skipped, 0
        account.report()

    def _loaded(self) -> Store:
        if self._store is None:
            raise DataError("there are no samples in memory: call load_into_memory() first")
        return self._store

    def _require_no_preload(self) -> None:
        if self._preload is not None:
            raise DataError("a preload is under way: call wait_preload_done() first")

    def _total(self, name: str, num: int, all_workers: bool) -> int:
        if not all_workers:
            return num
        workers = self.workers()
        try:
            return int(as_numbers(workers.gather(name, np.int64(num).tobytes())).sum())
        finally:
            workers.close()


def _load(options: ReadOptions, layout: SampleLayout, paths: list[str], num_threads: int) -> tuple[Store, Account]:
    """All samples of the files, in the order of files and lines, with any number of threads."""
    store, account, files, closing = Store(layout), Account(), OwnFileQueue(paths), threading.Event()
    ranges: dict[str, list[range]] = {path: [] for path in paths}
    num_done = 0

    def read_files(put: Callable[[str], None]) -> None:
        reader = options.reader(layout, closing.is_set)
        while (path := files.take()) is not None:
            source = reader.source(path)
            ranges[path] += [store.append(rows) for rows in reader.read(path, source)]
            account.note(source.skipped.num, source.skipped.first)
            put(path)

    progress = Progress("loading")
    feed = Feed([read_files] * min(num_threads, max(1, len(paths))), len(paths) + 1, closing)
    try:
        for _ in feed:
            num_done += 1
            progress.show(f"{num_done} of {len(paths)} files, {store.num:,} samples")
    finally:
        feed.close()
    progress.end(f"{len(paths)} files, {store.num:,} samples, {store.num_bytes / 2**20:,.0f} MiB")
    parts = [np.arange(part.start, part.stop) for path in paths for part in ranges[path]]
    store.order = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return store, account


class _Preload:
    """Loading in a separate thread; its error is raised in the thread that waits for it."""

    def __init__(self, load: Callable[[], tuple[Store, Account]]) -> None:
        self._load = load
        self._result: tuple[Store, Account] | None = None
        self._thread = BackgroundThreads([self._run])
        self._thread.start()

    def wait(self) -> tuple[Store, Account]:
        self._thread.join()
        self._thread.check()
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        self._result = self._load()
