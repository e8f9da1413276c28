"""Writes the part files of one save: every row goes to a file of the shard that owns it."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import part_file
from torchfleet.ps.checkpoint.manifest import Link, Part, Table
from torchfleet.ps.checkpoint.part_reader import read_parts
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.spec import TableSpec, table_number
from torchfleet.ps.tables.table import PartKind

PART_BYTES = 1 << 25  # bytes of a file
_UNDER_WAY = 2  # files being written while the next one fills

Show = Callable[[str], None]
Live = Iterator[tuple[Keys, part_file.Arrays]]


def write_file(target: Storage, name: str, buffers: Sequence[Any]) -> None:
    with _naming(target):
        target.write(name, buffers)


def write_made_file(target: Storage, name: str, buffers: Iterable[Any], num_bytes: int) -> None:
    """Write a file of `num_bytes` bytes from buffers that are created one at a time, just before each is written."""
    with _naming(target):
        target.write_made(name, buffers, num_bytes)


@contextlib.contextmanager
def _naming(target: Storage) -> Iterator[None]:
    """Turn the errors of a file system into a CheckpointError that names the folder."""
    try:
        yield
    except FleetError:
        raise
    except Exception as error:  # each file system raises its own errors
        raise CheckpointError(f"cannot write to {target.path}: {type(error).__name__}: {error}") from error


class Files:
    """Part files of one folder, filled per server and written by threads."""

    def __init__(
        self,
        target: Storage,
        folder: str,
        num_servers: int,
        show: Show,
        first: int = 0,
        num_threads: int = _UNDER_WAY,
    ) -> None:
        """`first`: the number of the first file of each table, kind and server. `num_threads`: threads that write."""
        self._first, self._num_threads = first, num_threads
        self._target, self._folder, self._num_servers, self._show = target, folder, num_servers, show
        self._pool = ThreadPoolExecutor(num_threads)
        self._under_way: deque[Future[Part]] = deque()
        self._written: list[Part] = []

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def put(self, spec: TableSpec, kind: PartKind, live: Live, nothing: part_file.Arrays) -> int:
        """Write every row to a file of the server that owns it; returns the number of rows. A server without rows gets
        a file with the arrays `nothing`, or no file if `nothing` is empty.
        """
        fillings = [Filling(spec.name, kind, server, self._first) for server in range(self._num_servers)]
        num = 0
        for keys, arrays in live:
            nothing = {name: array[:0] for name, array in arrays.items()} if not num else nothing
            for server, chosen in _by_owner(spec, keys, self._num_servers):
                filling = fillings[server]
                more = {"keys": keys[chosen], **{name: array[chosen] for name, array in arrays.items()}}
                if not filling.takes(more):
                    self._submit(filling)
                filling.add(more)
                if filling.size >= PART_BYTES:
                    self._submit(filling)
            num += len(keys)
            self._show(f"{spec.name}: {num:,} {kind}")
        for filling in fillings:
            if not filling.pieces and filling.number == self._first and nothing:
                filling.add({"keys": np.empty(0, np.uint64), **nothing})
            if filling.pieces:
                self._submit(filling)
        return num

    def copy(self, source: Storage, link: Link, table: Table, kind: PartKind) -> None:
        """Copy the files of a kind that every save contains completely."""
        numbers: Counter[int] = Counter()
        for part, arrays in read_parts(source, link.save, link.parts_of(table.name, kind), lambda *both: both):
            filling = Filling(table.name, kind, part.shard, numbers[part.shard])
            numbers[part.shard] += 1
            filling.pieces = {name: [array] for name, array in arrays.items()}
            self._submit(filling, part)

    def written(self) -> list[Part]:
        """Wait until all files are on disk, and return their parts."""
        while self._under_way:
            self._written.append(self._under_way.popleft().result())
        return self._written

    def _submit(self, filling: Filling, like: Part | None = None) -> None:
        if len(self._under_way) >= self._num_threads:
            self._written.append(self._under_way.popleft().result())
        num_rows, start = (like.rows, like.start) if like else (filling.num_rows, 0)
        part = Part(filling.table, filling.file, filling.server, num_rows, 0, 0, start, filling.kind, repeats=0)
        self._under_way.append(self._pool.submit(self._write, part, filling.pieces))
        filling.begin(filling.number + 1)

    def _write(self, part: Part, pieces: part_file.Pieces) -> Part:
        buffers = part_file.encode_pieces(pieces)
        write_file(self._target, f"{self._folder}/{part.file}", buffers)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        return msgspec.structs.replace(part, bytes=size, crc32=part_file.checksum(buffers))


class Filling:
    """The next file of one table, kind and server."""

    def __init__(self, table: str, kind: PartKind, server: int, number: int = 0) -> None:
        self.table, self.kind, self.server = table, kind, server
        self.begin(number)

    def begin(self, number: int) -> None:
        self.number, self.size, self.num_rows = number, 0, 0
        self.pieces: part_file.Pieces = {}

    def takes(self, arrays: part_file.Arrays) -> bool:
        """Whether these arrays fit: the file has the same tensors in the same types, and does not become too large."""
        if not self.pieces:
            return True
        size = self.size + sum(array.nbytes for array in arrays.values())
        kinds = {name: pieces[0].dtype for name, pieces in self.pieces.items()}
        return kinds == {name: array.dtype for name, array in arrays.items()} and (
            size <= PART_BYTES or self.size < PART_BYTES // 2
        )

    def add(self, arrays: part_file.Arrays) -> None:
        for name, array in arrays.items():
            self.pieces.setdefault(name, []).append(array)
            self.size += array.nbytes
        self.num_rows += len(arrays["keys"])

    @property
    def file(self) -> str:
        name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in self.table)
        kind = "" if self.kind == "rows" else f".{self.kind}"
        return f"{name}-{table_number(self.table):08x}{kind}.{self.server}-{self.number:05}.safetensors"


def _by_owner(spec: TableSpec, keys: Keys, num_servers: int) -> Iterator[tuple[int, Any]]:
    """(server, which of the keys are its own), for servers that have any."""
    owners = owners_of(spec, keys, num_servers)
    counts = np.bincount(owners, minlength=num_servers)
    if len(keys) and counts.max() == len(keys):
        yield int(counts.argmax()), slice(None)  # no copy
        return
    order = np.argsort(owners, kind="stable")
    stops = np.cumsum(counts)
    for server in np.flatnonzero(counts).tolist():
        yield server, order[stops[server] - counts[server] : stops[server]]
