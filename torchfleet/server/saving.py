"""Saving this server's share of a model: in slices between requests, with the disk in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import msgspec
import numpy as np

from torchfleet.checkpoint import parts
from torchfleet.checkpoint.manifest import Part, Saved
from torchfleet.checkpoint.storage import Storage
from torchfleet.errors import CheckpointError, FleetError
from torchfleet.net.wire import pack
from torchfleet.server.state import Saving, State
from torchfleet.tables.dense import DenseTable
from torchfleet.tables.sparse import SparseTable
from torchfleet.tables.spec import part_range, table_number

SLICE = 1 << 14  # row numbers between two requests: one to three milliseconds
PART_BYTES = 1 << 25  # of a file
_LOOK = 0.2  # seconds
NUM_WRITERS = 2
MAX_SAVES = 4  # whose outcome is remembered, for a repeat of the request


class SaveBody(msgspec.Struct, forbid_unknown_fields=True):
    dirname: str
    folder: str
    with_state: bool
    token: int  # new for every save: a repeat of the request is known by it


def save_in_slices(state: State, saving: Saving, body: SaveBody) -> Iterator[bool]:
    """A job: yields after every slice (Server.work says what), and answers the request at the end."""
    writer: Writer | None = None
    try:
        writer = Writer(Storage(body.dirname), body.folder)
        steps, rows = {}, {}
        for table in list(state.tables.values()):
            steps[table.spec.name] = table.step
            before = writer.num_rows
            for job in _dense(table, body) if isinstance(table, DenseTable) else _sparse(table, body):
                while job is not None and not writer.offer(job):
                    yield False
                yield True
            rows[table.spec.name] = writer.num_rows - before
        while not writer.is_done():
            yield False
        written = sorted(
            writer.written, key=lambda part: part.file
        )  # as they were read: of a key twice, the later stands
        saving.result = [pack(Saved(written, steps, rows))]
    except Exception as error:  # whatever it is, it must not end the service of all others
        text = str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
        saving.result = CheckpointError(f"cannot save to {body.dirname}: {text}")
    finally:
        if writer is not None:
            writer.close()
    state.finish(saving.request, saving.result)


Job = tuple[str, int, int, int, parts.Pieces]  # table, server's part, number of the file, first element, arrays


def _sparse(table: SparseTable, body: SaveBody) -> Iterator[Job | None]:
    """Files of at most PART_BYTES, and None after slices that fill none."""
    width = table.num_words if body.with_state else table.spec.dim
    kept: parts.Pieces = {"keys": [], "rows": []}
    size = number = 0
    for keys, rows in table.chunks(SLICE):
        kept["keys"].append(keys)
        kept["rows"].append(rows[:, :width])
        size += len(keys) * (8 + 4 * width)
        if size >= PART_BYTES:
            yield table.spec.name, table.spec.part, number, 0, kept
            kept, size, number = {"keys": [], "rows": []}, 0, number + 1
        else:
            yield None
    if kept["keys"] or not number:
        kept["keys"].append(np.empty(0, np.uint64))
        kept["rows"].append(np.empty((0, width), np.float32))
        yield table.spec.name, table.spec.part, number, 0, kept


def _dense(table: DenseTable, body: SaveBody) -> Iterator[Job]:
    """One file per part: dense tables are small next to what a server holds."""
    block = table.block()
    first, _ = part_range(table.spec.size, table.spec.part, table.spec.num_parts)
    yield table.spec.name, table.spec.part, 0, first, {"values": [block if body.with_state else block[:1].copy()]}


class Writer:
    """Writes files in threads of its own, so that checksums and the disk overlap; at most one file waits."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._queue: queue.Queue[Job] = queue.Queue(1)
        self._error: FleetError | None = None
        self._num_under_way = 0
        self._is_over = False
        self.num_rows = 0
        self.written: list[Part] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_WRITERS)]
        for thread in self._threads:
            thread.start()

    def offer(self, job: Job) -> bool:
        """Whether it was taken; not while another one waits. Raises what went wrong with an earlier one."""
        if self._error is not None:
            raise self._error
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return False
        self._num_under_way += 1
        self.num_rows += _num_rows(job[-1])
        return True

    def is_done(self) -> bool:
        if self._error is not None:
            raise self._error
        return len(self.written) == self._num_under_way

    def close(self) -> None:
        """Let the threads end; nothing waits for them."""
        self._is_over = True

    def _run(self) -> None:
        while self._error is None and not self._is_over:
            try:
                job = self._queue.get(timeout=_LOOK)
            except queue.Empty:
                continue
            try:
                self.written.append(self._write(*job))
            except Exception as error:  # of the disk or the network: whoever asked is told
                self._error = CheckpointError(f"cannot write to {self._storage.path}: {type(error).__name__}: {error}")

    def _write(self, table: str, part: int, number: int, start: int, arrays: parts.Pieces) -> Part:
        name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in table)
        file = f"{name}-{table_number(table):08x}.{part}-{number:05}.safetensors"
        buffers = parts.encode_pieces(arrays)
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._storage.write(f"{self._folder}/{file}", buffers)
        return Part(table, file, part, _num_rows(arrays), num_bytes, parts.checksum(buffers), start)


def _num_rows(arrays: parts.Pieces) -> int:
    return sum(len(piece) for piece in arrays["keys"]) if "keys" in arrays else int(arrays["values"][0].shape[1])
