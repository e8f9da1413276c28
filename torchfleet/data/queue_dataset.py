"""QueueDataset: batches that are read from files while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torchfleet.data.dataset import BatchIterator, Dataset, DatasetPass, SharedFileQueue
from torchfleet.data.feed import Feed
from torchfleet.data.file_passes import Account, FileQueue, OwnFileQueue, Reading
from torchfleet.errors import DataError

LEASE = 30.0  # seconds of silence after which a worker's files go to others


class QueueDataset(Dataset):
    """Reads its files anew in every pass, and keeps a few batches in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._dynamic: tuple[str, float] | None = None

    def set_filelist(
        self, files: Sequence[str], dynamic: bool = False, name: str = "files", lease: float = LEASE
    ) -> None:
        """The files of this worker; with `dynamic`, the files of all workers, which take them one after another.

        `name` distinguishes such lists of a job. After `lease` seconds of silence a worker's files go to others.
        """
        if not isinstance(lease, (int, float)) or not 0.1 <= lease <= 86400:
            raise DataError(f"lease: expected 0.1 to 86400 seconds, found {lease!r}")
        super().set_filelist(files)
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
        account = Account()
        reading = Reading(files, self._layout, self.batch_size, self.drop_last, num_threads, account)
        closing = reading.closing
        readers = [settings.reader(self._layout, closing.is_set) for _ in range(num_threads)]
        feed = Feed([partial(reading.run, reader) for reader in readers], self._queue_size, closing)

        def report() -> None:
            self.num_skipped = account.num_skipped
            account.report()

        return BatchIterator(DatasetPass(feed, at_end, report))


class _Settled:
    """A shared file queue whose files are done when the servers have the gradients of all their samples."""

    def __init__(self, files: SharedFileQueue, dataset: Dataset) -> None:
        self._files, self._dataset = files, dataset

    def take(self) -> str | None:
        return self._files.take()

    def done(self, path: str) -> None:
        self._dataset.settle()
        self._files.done(path)
