"""The base class of datasets: their settings, and the iterator over the batches of a pass."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.base.paddle_names import DATASET, WithPaddleNames
from torchfleet.data.feed import Feed
from torchfleet.data.file_passes import END, HELD, FileBatch, FileQueue, is_batch
from torchfleet.data.reading.reader import ReadOptions
from torchfleet.data.reading.streams import check_files
from torchfleet.data.slots import SampleLayout, Slot


class SampleExchange(Protocol):
    """Sends parcels of samples to other workers. Parcels that arrive are passed to `on_parcel`."""

    def send(
        self, to: int, arrays: list[npt.NDArray[Any]], on_parcel: Callable[[list[npt.NDArray[Any]]], None]
    ) -> None: ...

    def take_until(
        self, is_enough: Callable[[], bool], on_parcel: Callable[[list[npt.NDArray[Any]]], None]
    ) -> None: ...

    def finish(self) -> None: ...


class SharedFileQueue(FileQueue, Protocol):
    """Files that all workers of a job take from a shared list."""

    def close(self) -> None: ...


class WorkerGroup(Protocol):
    """The workers of a job, as datasets see them: torchfleet.ps.worker.peers.Workers, or Alone."""

    index: int
    num: int

    def gather(self, name: str, data: bytes) -> list[bytes]: ...

    def exchange(self, topic: str) -> SampleExchange: ...

    def files(self, name: str, paths: Sequence[str], lease: float) -> SharedFileQueue: ...

    def close(self) -> None: ...


class Dataset(WithPaddleNames, ABC):
    """Files and how to read them. `init` first, then `set_filelist`, then iterate."""

    _PADDLE_NAMES = DATASET

    def __init__(self) -> None:
        self._given: dict[str, Any] = {}  # arguments of `init`, and of the setters
        self._options: ReadOptions | None = None
        self._files: list[str] | None = None
        self.num_skipped = 0  # malformed lines that the last pass (or loading) skipped

    def init(
        self,
        batch_size: int = 1,
        thread_num: int = 1,
        use_var: Sequence[Slot] = (),
        pipe_command: Any = None,
        data_format: Any = None,
        on_bad_line: str = "error",
        drop_last: bool = False,
        queue_batches: int | None = None,
    ) -> None:
        """Settings; docs/data.md explains each."""
        use_var = list(use_var) if isinstance(use_var, Iterable) else use_var
        if not isinstance(drop_last, bool):
            raise DataError(f"drop_last must be True or False, found {drop_last!r}")
        self.batch_size, self.thread_num = checked("batch_size", batch_size), checked("thread_num", thread_num)
        default = max(4, 2 * thread_num)
        self._queue_size = default if queue_batches is None else checked("queue_batches", queue_batches)
        self.drop_last = drop_last
        self._options = ReadOptions(use_var, pipe_command, data_format, on_bad_line)
        self._layout = SampleLayout(use_var)
        self._given = {
            **{"batch_size": batch_size, "thread_num": thread_num, "use_var": use_var, "pipe_command": pipe_command},
            **{"data_format": data_format, "on_bad_line": on_bad_line, "drop_last": drop_last},
            "queue_batches": queue_batches,
        }

    def set_batch_size(self, batch_size: int) -> None:
        """Set one argument of `init`, as the next three methods do: Paddle's way before 2.0."""
        self._set("batch_size", checked("batch_size", batch_size))

    def set_thread(self, thread_num: int) -> None:
        self._set("thread_num", checked("thread_num", thread_num))

    def set_use_var(self, var_list: Sequence[Slot]) -> None:
        self._set("use_var", var_list)

    def set_pipe_command(self, pipe_command: Any) -> None:
        self._set("pipe_command", pipe_command)

    def _set(self, name: str, value: Any) -> None:
        """Set one argument. Calls `init`, which checks all arguments so far, once the slots are among them."""
        given = {**self._given, name: value}
        if "use_var" in given:
            self.init(**given)
        self._given = given

    def set_filelist(self, files: Sequence[str]) -> None:
        """The files of this worker; fleet.util.get_file_shard(files) gives each worker its share of a common list."""
        self._files = check_files(files)

    def __iter__(self) -> BatchIterator:
        """One pass."""
        return self.iterate()

    @abstractmethod
    def iterate(self) -> BatchIterator:
        """One pass; close the iterator if you leave it before its end."""

    @property
    def num_samples(self) -> int | None:
        """The number of samples of a pass on this worker; None while it is unknown."""
        return None

    @property
    def is_shared(self) -> bool:
        """Whether all workers take files from one list."""
        return False

    @property
    def settings(self) -> ReadOptions:
        if self._options is None:
            raise DataError("call dataset.init(batch_size=..., use_var=[...]) or dataset.set_use_var([...]) first")
        return self._options

    @property
    def read_options(self) -> ReadOptions | None:
        """The settings of `init`; None for data that does not come from files."""
        return self._options

    @property
    def filelist(self) -> list[str]:
        if self._files is None:
            raise DataError("call dataset.set_filelist([...]) first")
        return self._files

    def workers(self) -> WorkerGroup:
        """The workers of the job, this one included. Without a job there is only this one."""
        return Alone()

    def settle(self) -> None:
        """Wait until the servers have all gradients of the batches so far."""


class DatasetPass:
    """One pass over a dataset, from which any number of threads take batches."""

    def __init__(
        self,
        feed: Feed[FileBatch],
        at_end: Callable[[], None],
        report: Callable[[], None],
        is_held: Callable[[], bool] | None = None,
    ) -> None:
        """`is_held`: whether no batch can come until other workers are done with their files; None: they have files
        of their own."""
        self._feed, self._at_end, self._report = feed, at_end, report
        self.is_shared, self._is_held = is_held is not None, is_held or (lambda: False)
        self._is_over = False

    def take(self) -> FileBatch | None:
        """Wait for the next batch; None at the end."""
        try:
            return next(self._feed)
        except StopIteration:
            return None

    def look_ahead(self) -> FileBatch | Any:
        """Wait for the next batch, END or HELD."""
        return self._feed.next_unless(self._is_held, HELD, END)

    def take_ready(self) -> FileBatch | None:
        """The next batch if it is ready; never waits."""
        return self._feed.take_ready()

    def close(self) -> None:
        """End the pass, even before its last batch."""
        if not self._is_over:
            self._is_over = True
            self._feed.close()
            self._at_end()
            self._report()


class BatchIterator:
    """The batches of a pass for one thread. A batch counts as used when the thread requests the next one."""

    def __init__(self, batches: DatasetPass, closes: bool = True) -> None:
        self._pass, self._closes = batches, closes
        self._handed: list[FileBatch] = []
        self.num_samples_taken = 0

    @property
    def is_shared(self) -> bool:
        """Whether all workers take files from one list."""
        return self._pass.is_shared

    def fork(self) -> BatchIterator:
        """An iterator over the same pass for another thread. Close this one when all threads have finished."""
        return BatchIterator(self._pass, closes=False)

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> FileBatch:
        """The next batch. All batches before it count as used."""
        try:
            self._release(0)
            batch = self._pass.take()
        except BaseException:
            self.close()
            raise
        if batch is None:
            self.close()
            raise StopIteration
        self._hand(batch)
        return batch

    def look_ahead(self, num_kept: int) -> FileBatch | Any:
        """The next batch, END or HELD. The last `num_kept` batches before it stay in use."""
        self._release(num_kept)
        found = self._pass.look_ahead()
        if is_batch(found):
            self._hand(found)
        return found

    def ready(self) -> FileBatch | None:
        """The next batch if it is ready, to look ahead: the previous batch stays in use."""
        batch = self._pass.take_ready()
        if batch is not None:
            self._release(1)
            self._hand(batch)
        return batch

    def close(self) -> None:
        """End the pass, even before its last batch. Batches still in use do not count as used."""
        if self._closes:
            self._pass.close()

    def _hand(self, batch: FileBatch) -> None:
        self._handed.append(batch)
        self.num_samples_taken += batch.num_samples

    def _release(self, num_kept: int) -> None:
        while len(self._handed) > num_kept:
            self._handed.pop(0).release()

    def __del__(self) -> None:
        self.close()


class Alone:
    """The worker group of a process without a job: one worker."""

    index, num = 0, 1

    def gather(self, name: str, data: bytes) -> list[bytes]:
        return [data]

    def exchange(self, topic: str) -> SampleExchange:
        raise DataError("there is no other worker to exchange samples with")

    def files(self, name: str, paths: Sequence[str], lease: float) -> SharedFileQueue:
        raise DataError("set_filelist(dynamic=True) shares files among workers: call fleet.init_worker() first")

    def close(self) -> None:
        pass


def checked(name: str, value: Any) -> int:
    """Returns `value`, which must be an int of at least 1; else raises DataError."""
    if type(value) is not int or value < 1:
        raise DataError(f"{name} must be a number of at least 1, found {value!r}")
    return value


def check_seed(seed: Any) -> None:
    """Raise DataError unless `seed` is None or a whole number from 0. In Paddle's shuffles, `fleet` is in its place."""
    if seed is not None and (type(seed) is not int or seed < 0):
        raise DataError(f"seed must be a whole number from 0, or None for any; found {seed!r:.80}")


def file_shard(files: Sequence[str], index: int, num: int) -> list[str]:
    """Every `num`-th file, starting at `index`: each file goes to one worker, and counts differ by at most one."""
    if isinstance(files, (str, bytes, os.PathLike)):
        raise DataError(f"get_file_shard: expected a list of paths, found the single {files!r}")
    return list(files)[index::num]


def as_numbers(gathered: list[bytes]) -> npt.NDArray[np.int64]:
    """One number from each worker."""
    return np.frombuffer(b"".join(gathered), np.int64)
