"""The part of a save that talks to the disk or to a store: in background threads, so that no request waits for it."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.ps.checkpoint import part_file
from torchfleet.ps.checkpoint.manifest import Part
from torchfleet.ps.kernels.rows import largest
from torchfleet.ps.server.saves.save_roots import SaveFolder, open_folder
from torchfleet.ps.tables.settings.spec import table_number
from torchfleet.ps.tables.table import PartKind

_LOOK = 0.2  # seconds
NUM_WRITERS = 2
MAX_SILENCE = 300.0  # seconds without an answer of the disk or store, or a file written, after which a save fails


@dataclass
class FileToWrite:
    """A part file that is not written yet."""

    table: str
    shard: int
    number: int
    arrays: part_file.Pieces
    start: int
    kind: PartKind
    repeats: int | None = None  # rows dropped since the save of the table began

    @property
    def num_rows(self) -> int:
        for name in ("keys", "blocks"):
            if name in self.arrays:
                return sum(len(piece) for piece in self.arrays[name])
        return int(self.arrays["values"][0].shape[1])


class Silence:
    """How long a disk or store has not answered."""

    def __init__(self, place: str) -> None:
        self._place, self._since = place, time.monotonic()

    def end(self) -> None:
        """Note an answer."""
        self._since = time.monotonic()

    def check(self) -> None:
        """Raise CheckpointError after MAX_SILENCE: other requests over whole tables wait for this save."""
        if time.monotonic() - self._since > MAX_SILENCE:
            raise CheckpointError(
                f"{self._place} has not answered for {MAX_SILENCE:.0f} s. Can this server reach it? Save again."
            )


class Opening:
    """Opens the folder of a save in a background thread: a store that does not answer holds up no other request."""

    def __init__(self, roots: Sequence[str], dirname: str, folder: str, token: int) -> None:
        self._folder: SaveFolder | None = None
        self._silence = Silence(dirname)

        def work() -> None:
            self._folder = open_folder(roots, dirname, folder, token)

        self._threads = BackgroundThreads([work])
        self._threads.start()

    @property
    def folder(self) -> SaveFolder | None:
        """The folder, or None while it is being opened. Raises the error of `open_folder`."""
        self._threads.check()
        if self._folder is None:
            self._silence.check()
        return self._folder


class Writer:
    """Writes files in background threads, so that checksums and disk writes overlap. At most one file waits."""

    def __init__(self, folder: SaveFolder) -> None:
        self._folder = folder
        self._queue: queue.Queue[FileToWrite] = queue.Queue(1)
        self._num_under_way = 0
        self._is_over = False
        self.written: list[Part] = []
        self._silence = Silence(folder.storage.path)
        self._threads = BackgroundThreads([self._run] * NUM_WRITERS)
        self._threads.start()

    def offer(self, file: FileToWrite) -> bool:
        """Queue a file without blocking. Returns False while another one waits. Raises the error of an earlier file."""
        self._threads.check()
        try:
            self._queue.put_nowait(file)
        except queue.Full:
            self._silence.check()
            return False
        if len(self.written) == self._num_under_way:  # nothing was asked of the store until now
            self._silence.end()
        self._num_under_way += 1
        return True

    def is_done(self) -> bool:
        self._threads.check()
        is_done = len(self.written) == self._num_under_way
        if not is_done:
            self._silence.check()
        return is_done

    def close(self) -> None:
        """Tell the threads to end. Does not wait for them."""
        self._is_over = True

    def _run(self) -> None:
        while self._threads.error is None and not self._is_over:
            try:
                file = self._queue.get(timeout=_LOOK)
            except queue.Empty:
                continue
            try:
                self.written.append(self._write(file))
                self._silence.end()
            except FleetError:
                raise
            except Exception as error:  # of the disk or the network; the client gets it as CheckpointError
                raise CheckpointError(
                    f"cannot write to {self._folder.storage.path}: {type(error).__name__}: {error}"
                ) from error

    def _write(self, file: FileToWrite) -> Part:
        table = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in file.table)
        name = f"{table}-{table_number(file.table):08x}.{file.shard}-{file.number:05}.safetensors"
        for kept in ("rows", "values", "row_state"):
            for piece in file.arrays.get(kept, ()):
                if not largest(piece) < np.inf:
                    raise CheckpointError(f"table '{file.table}' holds NaN or infinity: a model with it would not load")
        buffers = part_file.encode_pieces(file.arrays)
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._folder.write(name, buffers)
        crc = part_file.checksum(buffers)
        return Part(file.table, name, file.shard, file.num_rows, num_bytes, crc, file.start, file.kind, file.repeats)
