"""Saving this server's share of a model: in slices between requests, with the disk in a thread of its own."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from torchfleet.background import BackgroundThreads
from torchfleet.checkpoint import part_file
from torchfleet.checkpoint.manifest import Part, PartKind, Saved
from torchfleet.checkpoint.part_writer import PART_BYTES
from torchfleet.errors import CheckpointError, FleetError
from torchfleet.net.wire import pack
from torchfleet.server.state.state import LongRequest, State
from torchfleet.storage import Storage
from torchfleet.tables.dense_table import DenseTable
from torchfleet.tables.policies.admission import Admission
from torchfleet.tables.settings.policy import BLOCK_BYTES
from torchfleet.tables.settings.spec import part_range, table_number
from torchfleet.tables.sparse_table import SparseTable

SLICE = 1 << 14  # row numbers between two requests: one to three milliseconds
_LOOK = 0.2  # seconds
NUM_WRITERS = 2
PART_BLOCKS = PART_BYTES // BLOCK_BYTES


class SaveBody(msgspec.Struct, forbid_unknown_fields=True):
    dirname: str
    folder: str
    with_state: bool
    token: int  # new for every save: a repeat of the request is known by it
    delta: bool = False  # only what changed since the save `parent`
    parent: int = 0  # token of the save that is the model there now


def save_in_slices(state: State, saving: LongRequest, body: SaveBody) -> Iterator[bool]:
    """A job: yields after every slice (Server.work says what), and answers the request at the end."""
    writer: Writer | None = None
    try:
        writer = Writer(Storage(body.dirname), body.folder)
        steps, rows, now = {}, {}, state.clock.now
        _begin(state, body)
        for table in list(state.tables.values()):
            steps[table.spec.name] = table.step
            for job in _dense(table, body) if isinstance(table, DenseTable) else _sparse(table, body):
                while job is not None and not writer.offer(job):
                    yield False
                yield True
            rows[table.spec.name] = table.stats()["rows"] if isinstance(table, SparseTable) else table.size
        while not writer.is_done():
            yield False
        # As they were read: of a key twice, the later stands.
        written = sorted(writer.written, key=lambda part: part.file)
        saving.result = [pack(Saved(written, steps, rows, now, state.clock.is_set))]
    except Exception as error:  # whatever it is, it must not end the service of all others
        text = str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
        saving.result = CheckpointError(f"cannot save to {body.dirname}: {text}")
    finally:
        if writer is not None:
            writer.close()
    state.finish(saving.request, saving.result)


def _begin(state: State, body: SaveBody) -> None:
    """All tables at once: what changes from here on belongs to the next save. One for prediction is no part of it."""
    if not body.with_state:
        return
    is_committed = state.chain.begin(body.token, body.parent, body.delta)
    for table in state.tables.values():
        if isinstance(table, SparseTable):
            table.begin_save(is_committed)


@dataclass
class Job:
    """A file to be written."""

    table: str
    part: int  # of which server
    number: int  # of the file
    arrays: part_file.Pieces
    start: int = 0
    kind: PartKind = "rows"

    @property
    def num_rows(self) -> int:
        for name in ("keys", "blocks"):
            if name in self.arrays:
                return sum(len(piece) for piece in self.arrays[name])
        return int(self.arrays["values"][0].shape[1])


def _sparse(table: SparseTable, body: SaveBody) -> Iterator[Job | None]:
    """Files of at most PART_BYTES, and None after slices that fill none."""
    files = Files(table.spec.name, table.spec.part)
    width = table.num_words if body.with_state else table.spec.dim
    mode: Literal["full", "delta"] = "delta" if body.delta else "full"
    if body.delta and table.tracking is not None:
        yield from files.add("gone", {"keys": table.absent(table.tracking.gone)})
        yield from files.end("gone")
    for keys, rows, columns in table.chunks(SLICE, mode if body.with_state else None):
        kept = {name: column for name, column in columns.items() if name != "delta"} if body.with_state else {}
        yield from files.add("rows", {"keys": keys, "rows": rows[:, :width], **kept})
    yield from files.end("rows", {"keys": np.empty(0, np.uint64), "rows": np.empty((0, width), np.float32)})
    if table.admission is not None and body.with_state:
        yield from _admission(table.admission, files, body.delta)


def _admission(admission: Admission, files: Files, is_delta: bool) -> Iterator[Job | None]:
    """What is known of keys that have no row."""
    if admission.candidates is not None:
        if is_delta:
            yield from files.add("candidates_gone", {"keys": admission.candidates.gone()})
            yield from files.end("candidates_gone")
        for keys, columns in admission.candidates.chunks(SLICE, is_delta):
            yield from files.add("candidates", {"keys": keys, **columns})
        yield from files.end("candidates")
    sketch = admission.sketch
    if sketch is not None:
        for start in range(sketch.first, sketch.first + sketch.num, PART_BLOCKS):
            stop = min(start + PART_BLOCKS, sketch.first + sketch.num)
            yield from files.add("sketch", {"blocks": sketch.blocks(start, stop)}, start)
            yield from files.end("sketch")


class Files:
    """Arrays of one table, gathered into files."""

    def __init__(self, table: str, part: int) -> None:
        self._table, self._part = table, part
        self._number = self._size = self._start = 0
        self._is_any: set[str] = set()
        self._kept: part_file.Pieces = {}
        self._kind: PartKind = "rows"

    def add(self, kind: PartKind, arrays: part_file.Arrays, start: int = 0) -> Iterator[Job | None]:
        """A file, if there is enough for one; else None: a slice that fills none."""
        if kind != self._kind:
            yield from self.end(self._kind)
        self._kind, self._start = kind, start
        for name, array in arrays.items():
            self._kept.setdefault(name, []).append(array)
            self._size += array.nbytes
        if self._size >= PART_BYTES:
            yield from self.end(kind)
        else:
            yield None

    def end(self, kind: PartKind, empty: part_file.Arrays | None = None) -> Iterator[Job]:
        """What is left; if there was nothing of this kind at all, a file with `empty`."""
        if not self._size and (empty is None or kind in self._is_any):
            self._kept = {}
            return
        kept = self._kept or {name: [array] for name, array in (empty or {}).items()}
        self._is_any.add(kind)
        yield Job(self._table, self._part, self._number, kept, self._start, kind)
        self._kept, self._size, self._number = {}, 0, self._number + 1


def _dense(table: DenseTable, body: SaveBody) -> Iterator[Job]:
    """One file per part: dense tables are small next to what a server holds."""
    block = table.block()
    first, _ = part_range(table.spec.size, table.spec.part, table.spec.num_parts)
    yield Job(table.spec.name, table.spec.part, 0, {"values": [block if body.with_state else block[:1].copy()]}, first)


class Writer:
    """Writes files in threads of its own, so that checksums and the disk overlap; at most one file waits."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._queue: queue.Queue[Job] = queue.Queue(1)
        self._num_under_way = 0
        self._is_over = False
        self.written: list[Part] = []
        self._threads = BackgroundThreads([self._run] * NUM_WRITERS)
        self._threads.start()

    def offer(self, job: Job) -> bool:
        """Whether it was taken; not while another one waits. Raises what went wrong with an earlier one."""
        self._threads.check()
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return False
        self._num_under_way += 1
        return True

    def is_done(self) -> bool:
        self._threads.check()
        return len(self.written) == self._num_under_way

    def close(self) -> None:
        """Let the threads end; nothing waits for them."""
        self._is_over = True

    def _run(self) -> None:
        while self._threads.error is None and not self._is_over:
            try:
                job = self._queue.get(timeout=_LOOK)
            except queue.Empty:
                continue
            try:
                self.written.append(self._write(job))
            except Exception as error:  # of the disk or the network: whoever asked is told
                raise CheckpointError(
                    f"cannot write to {self._storage.path}: {type(error).__name__}: {error}"
                ) from error

    def _write(self, job: Job) -> Part:
        name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in job.table)
        file = f"{name}-{table_number(job.table):08x}.{job.part}-{job.number:05}.safetensors"
        buffers = part_file.encode_pieces(job.arrays)
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._storage.write(f"{self._folder}/{file}", buffers)
        crc = part_file.checksum(buffers)
        return Part(job.table, file, job.part, job.num_rows, num_bytes, crc, job.start, job.kind)
