"""One pass over files: threads take files, cut their rows into batches, and count skipped lines and finished files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from torchfleet.data.reading.formats import LineSource
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.slots import Batch, RowSelection, SampleLayout


class _Samples(Protocol):
    @property
    def num(self) -> int: ...


Samples = TypeVar("Samples", bound=_Samples)  # SampleRows, or ColumnSamples
Samples_co = TypeVar("Samples_co", covariant=True)
Samples_contra = TypeVar("Samples_contra", contravariant=True)
_POLL = 0.2  # seconds between two checks for a file that another worker has given up

END: Any = object()  # in place of a batch: there are no more
HELD: Any = object()  # in place of a batch: there is none until other workers are done with their files


def look_ahead(batches: Iterator[Any], num_kept: int) -> Any:
    """The next batch, END or HELD, while up to `num_kept` batches before it are in use."""
    find = getattr(batches, "look_ahead", None)
    return next(batches, END) if find is None else find(num_kept)


def is_batch(found: Any) -> bool:
    """Whether `look_ahead` found a batch."""
    return found is not END and found is not HELD


class FileQueue(Protocol):
    """The queue from which the threads of a pass take files."""

    def take(self) -> str | None:
        """The next file; "" if there is none at present, None at the end."""

    def done(self, path: str) -> None:
        """Report that all samples of the file have been used."""


class OwnFileQueue:
    """The files of this worker only."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths, self._lock = list(reversed(paths)), threading.Lock()

    def take(self) -> str | None:
        with self._lock:
            return self._paths.pop() if self._paths else None

    def done(self, path: str) -> None:
        pass


class Ticket:
    """A reference count of a file: `on_done` is called when its last sample has been used."""

    def __init__(self, path: str, on_done: Callable[[str], None]) -> None:
        self.path, self._on_done = path, on_done
        self._num, self._lock = 1, threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._num += 1

    def release(self) -> None:
        with self._lock:
            self._num -= 1
            is_done = self._num == 0
        if is_done:
            self._on_done(self.path)


class FileBatch(Batch):
    """A batch with the tickets of the files that its samples come from."""

    tickets: tuple[Ticket, ...] = ()

    def __reduce__(self) -> tuple[type[Batch], tuple[dict[str, Any], int]]:
        return Batch, (dict(self), self.num_samples)  # in another process it is a plain batch

    def release(self) -> None:
        """Count the batch's samples as used."""
        tickets, self.tickets = self.tickets, ()
        for ticket in tickets:
            ticket.release()


class Cutter:
    """Cuts rows into batches of one size."""

    def __init__(self, layout: SampleLayout, batch_size: int, put: Callable[[FileBatch], None]) -> None:
        self._layout, self._batch_size, self._put = layout, batch_size, put
        self._selections: list[tuple[RowSelection, Ticket]] = []
        self._num = 0

    def add(self, rows: SampleRows, ticket: Ticket) -> None:
        index = np.arange(rows.num)
        while len(index):
            taken, index = np.split(index, [self._batch_size - self._num])
            ticket.hold()
            self._selections.append((RowSelection(rows, taken), ticket))
            self._num += len(taken)
            if self._num == self._batch_size:
                self.cut()

    def cut(self) -> None:
        """Put a batch of the rows so far, full or not."""
        if self._selections:
            made = self._layout.batch([selection for selection, _ in self._selections])
            batch = FileBatch(dict(made), made.num_samples)
            batch.tickets = tuple(ticket for _, ticket in self._selections)
            self._selections, self._num = [], 0
            self._put(batch)

    def drop(self) -> None:
        """Drop the rows so far; they count as used."""
        selections, self._selections, self._num = self._selections, [], 0
        for _, ticket in selections:
            ticket.release()

    def move_to(self, other: Cutter) -> None:
        """Move the rows so far to another cutter."""
        selections, self._selections, self._num = self._selections, [], 0
        for (rows, order), ticket in selections:
            other.add(rows.pick(order), ticket)
            ticket.release()


class BatchCutter(Protocol[Samples_contra]):
    """Turns the samples of one thread into batches: Cutter, or ColumnCutter."""

    def add(self, rows: Samples_contra, ticket: Ticket, /) -> None: ...

    def cut(self) -> None: ...

    def drop(self) -> None: ...

    def move_to(self, other: Any, /) -> None: ...


class SampleReader(Protocol[Samples_co]):
    """Reads the files of one thread."""

    def source(self, path: str) -> LineSource: ...

    def read(self, path: str, source: LineSource) -> Iterator[Samples_co]: ...


class Account:
    """Counts the skipped lines and the samples of a pass."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self.num_samples: dict[str, int] = {}  # by file, for files that were read to the end
        self.is_complete = False  # all files were read to the end
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def note(self, num: int, first: str) -> None:
        with self._lock:
            self.num_skipped += num
            if num:
                self._lines.append(f"  {num:,}, the first: {first}")

    def note_file(self, path: str, num: int) -> None:
        """Record the number of samples of a file that was read to the end; a file listed twice is read twice."""
        with self._lock:
            self.num_samples[path] = self.num_samples.get(path, 0) + num

    def report(self) -> None:
        if self.num_skipped:
            more = [f"  and in {len(self._lines) - 20} more files"] if len(self._lines) > 20 else []
            text = "\n".join([f"skipped {self.num_skipped:,} malformed lines:", *self._lines[:20], *more])
            print(text, file=sys.stderr, flush=True)


class Reading(Generic[Samples]):
    """What the threads of one pass of a QueueDataset share."""

    def __init__(
        self,
        files: FileQueue,
        make_cutter: Callable[[Callable[[FileBatch], None]], BatchCutter[Samples]],
        drop_last: bool,
        num_threads: int,
        account: Account,
    ) -> None:
        self._files, self._make_cutter, self._drop_last = files, make_cutter, drop_last
        self._num_running, self._lock, self.account = num_threads, threading.Lock(), account
        self._rests: list[BatchCutter[Samples]] = []
        self._num_idle = 0  # threads for which no file is left, while other workers use theirs
        self.closing = threading.Event()

    def run(self, reader: SampleReader[Samples], put: Callable[[FileBatch], None]) -> None:
        """Run one thread, which reads files one after another. The last thread to end batches all remaining rows."""
        cutter, is_idle = self._make_cutter(put), False
        while (path := self._files.take()) is not None:
            if path:
                if is_idle:
                    is_idle = False
                    self._count_idle(-1)
                self._read(reader, path, cutter)
                continue
            # Other workers have the last files, and may wait until ours are done: do not keep rows for a fuller batch.
            self._end(cutter)
            if not is_idle:
                is_idle = True
                self._count_idle(1)
            if self.closing.wait(_POLL):  # training has ended: other workers may never finish their files
                return
        if is_idle:
            self._count_idle(-1)
        with self._lock:
            self._rests.append(cutter)
            self._num_running -= 1
            if self._num_running:
                return
        for rest in self._rests:
            if rest is not cutter:
                rest.move_to(cutter)
        self._end(cutter)
        self.account.is_complete = not self.closing.is_set()

    @property
    def is_held(self) -> bool:
        """Whether all threads wait for other workers' files."""
        return 0 < self._num_running == self._num_idle

    def _count_idle(self, num: int) -> None:
        with self._lock:
            self._num_idle += num

    def _read(self, reader: SampleReader[Samples], path: str, cutter: BatchCutter[Samples]) -> None:
        source, ticket, num = reader.source(path), Ticket(path, self._files.done), 0
        try:
            for rows in reader.read(path, source):
                num += rows.num
                cutter.add(rows, ticket)
            self.account.note_file(path, num)
        finally:
            self.account.note(source.skipped.num, source.skipped.first)
        ticket.release()

    def _end(self, cutter: BatchCutter[Samples]) -> None:
        cutter.drop() if self._drop_last else cutter.cut()
