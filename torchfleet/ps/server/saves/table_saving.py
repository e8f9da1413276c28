"""Saving this server's share of a model, in slices between requests. save_writer.py talks to the disk or store."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np

from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.ps.checkpoint import part_file
from torchfleet.ps.checkpoint.manifest import Part, Saved
from torchfleet.ps.checkpoint.part_writer import PART_BYTES
from torchfleet.ps.net.wire import pack
from torchfleet.ps.server.saves.save_writer import FileToWrite, Opening, Writer
from torchfleet.ps.server.state.saves import SavesMade
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.state.work_queue import LongRequest
from torchfleet.ps.tables.table import PartKind, SavedSlice, SaveMode, Table

_SOME = np.ones(1, np.uint64)  # in place of the keys, for a slice of a kind without keys
SLICE = 1 << 14  # rows copied between two requests: one to three milliseconds


class SaveBody(msgspec.Struct, forbid_unknown_fields=True):
    dirname: str
    folder: str
    with_state: bool
    token: int  # new for every save; identifies repeats of the request
    delta: bool = False  # save only what changed since the save `parent`
    parent: int = 0  # token of the save that is the current model in `dirname`

    @property
    def mode(self) -> SaveMode:
        if not self.with_state:
            return "inference"
        return "delta" if self.delta else "full"


def save_in_slices(state: State, saving: LongRequest, body: SaveBody) -> Iterator[bool]:
    """Yield after every slice the value that Server.work returns, and answer the request at the end."""
    writer: Writer | None = None
    started = time.monotonic()
    try:
        opening = Opening(state.saves.roots, body.dirname, body.folder, body.token)
        while opening.folder is None:
            yield False
        writer = Writer(opening.folder)
        steps, rows, now = {}, {}, state.clock.now
        if state.saves.chain.attempt != body.token:  # a save that is repeated after a restart has begun already
            begin_save(state, body)
        for table in list(state.tables.values()):
            steps[table.spec.name] = table.step
            for file in _files(table, body.mode):
                while file is not None and not writer.offer(file):
                    yield False
                yield True
            rows[table.spec.name] = table.num_rows
        while not writer.is_done():
            yield False
        # In the order of reading: if a key appears twice, the later row is loaded.
        written = sorted(writer.written, key=lambda part: part.file)
        saving.result = [pack(Saved(written, steps, rows, now, state.clock.is_set))]
        seconds = time.monotonic() - started
        num_rows, num_bytes = _num_rows(state, written), sum(part.bytes for part in written)
        state.saves.made = SavesMade(state.saves.made.num + 1, time.time(), seconds, num_rows, num_bytes, body.dirname)
        described = f"{num_rows:,} rows and the network to {body.dirname}, {body.folder} ({body.mode})"
        state.say(f"saved {described} in {seconds:.1f} s")
    except Exception as error:  # a failed save must not stop the server
        text = str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"
        saving.result = CheckpointError(f"cannot save to {body.dirname}: {text}")
        state.say(str(saving.result))
    finally:
        if writer is not None:
            writer.close()
    state.finish(saving.request, saving.result)


def _num_rows(state: State, written: list[Part]) -> int:
    sparse = {table.spec.name for table in state.tables.values() if not table.spec.is_dense}
    return sum(part.rows for part in written if part.kind == "rows" and part.table in sparse)


def begin_save(state: State, body: SaveBody) -> None:
    """Mark the beginning of a save in all tables at once. Later changes belong to the next save.

    A save for prediction (without state) does not take part in the chain of deltas.
    """
    if not body.with_state:
        return
    is_committed = state.saves.chain.begin(body.token, body.parent, body.delta)
    for table in state.tables.values():
        table.begin_save(is_committed)


def _files(table: Table, mode: SaveMode) -> Iterator[FileToWrite | None]:
    """Yield files of about PART_BYTES, and None after each slice that did not fill a file."""
    filling, before = Filling(table.spec.name, table.spec.shard), table.num_dropped
    for saved in table.save_slices(mode, SLICE):
        for file in filling.add(saved):
            yield _counted(file, table, before)
    for file in filling.end():
        yield _counted(file, table, before)


def _counted(file: FileToWrite | None, table: Table, before: int) -> FileToWrite | None:
    """Note how many keys of the file may repeat. For candidates, the number of dropped keys is not known."""
    if file is not None and file.kind != "candidates":
        file.repeats = table.num_dropped - before
    return file


class Filling:
    """Collects slices of one table into files. Each file has slices of one kind."""

    def __init__(self, table: str, shard: int) -> None:
        self._table, self._shard = table, shard
        self._number = self._size = self._start = 0
        self._written: set[PartKind] = set()
        self._arrays: part_file.Pieces = {}
        self._kind: PartKind | None = None

    def add(self, saved: SavedSlice) -> Iterator[FileToWrite | None]:
        """Add a slice. Yields the files that are full now, or None if no file is full."""
        if saved.kind == self._kind and not saved.arrays.get("keys", _SOME).size:  # the table waits for its disk
            yield None
            return
        if saved.kind != self._kind or saved.start:
            yield from self.end()
        self._kind, self._start = saved.kind, saved.start
        for name, array in saved.arrays.items():
            self._arrays.setdefault(name, []).append(array)
            self._size += array.nbytes
        if self._size >= PART_BYTES:
            yield from self.end()
        else:
            yield None

    def end(self) -> Iterator[FileToWrite]:
        """Yield the last file. A file without rows is written only if the table would have no file of rows at all."""
        is_needed = self._kind == "rows" and "rows" not in self._written
        if self._kind is not None and (self._size or is_needed):
            self._written.add(self._kind)
            yield FileToWrite(self._table, self._shard, self._number, self._arrays, self._start, self._kind)
            self._number += 1
        self._arrays, self._size = {}, 0
