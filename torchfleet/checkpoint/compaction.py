"""A chain of saves made into one full save. It loads as the chain does, to the bit."""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from torchfleet.checkpoint import parts
from torchfleet.checkpoint.chain import live_candidates, live_rows
from torchfleet.checkpoint.donefile import write_donefile
from torchfleet.checkpoint.lock import alone
from torchfleet.checkpoint.manifest import (
    VERSION,
    Link,
    Manifest,
    Part,
    PartKind,
    Table,
    next_save,
    read_manifest,
    remove_others,
    write_manifest,
)
from torchfleet.checkpoint.reading import read_parts
from torchfleet.checkpoint.storage import Storage
from torchfleet.errors import CheckpointError, FleetError
from torchfleet.tables.keymap import Keys
from torchfleet.tables.owners import owners_of
from torchfleet.tables.spec import TableSpec, table_number

PART_BYTES = 1 << 25  # of a file
_UNDER_WAY = 2  # files being written while the next one fills
_COMPACTED = re.compile("save-[0-9]{12}")

Show = Callable[[str], None]
Live = Iterator[tuple[Keys, parts.Arrays]]


def compact(dirname: str, output: str | None = None, show: Show = lambda text: None) -> Manifest:
    """Put one full save in the place of a chain, or into the folder `output`; returns its manifest.

    Number, token, time and extra stay those of the chain's newest save, so that a job goes on from it with deltas. A
    process that is killed at any moment leaves the chain, or the full save. Deltas that are saved meanwhile stay, and
    stand behind the full save; another full save stays as it is, and this is an error. `show` is told how far it is.

    Memory: one file per server, a few more on their way, and the keys of a table (`live_rows`).
    """
    source = Storage(dirname)
    target = source if output is None else Storage(output)
    manifest = read_manifest(source)
    in_place = _real(target) == _real(source)
    if in_place and not manifest.base:
        return manifest
    with alone(target):
        folder = f"save-{next_save(target):012}"  # a name that no save of a job takes at the same moment
        _write(target, f"{folder}/compacted.json", [msgspec.json.encode([link.number for link in manifest.links()])])
    try:
        made = _made(source, manifest, target, folder, show)
    except BaseException:
        target.remove_folder(folder)
        raise
    with alone(target):
        return _replace(target, made, manifest.links() if in_place else None)


def _real(storage: Storage) -> str:
    return os.path.realpath(storage.path) if storage.is_local else storage.path


def _made(source: Storage, manifest: Manifest, target: Storage, folder: str, show: Show) -> Manifest:
    newest = manifest.links()[-1]
    tables = []
    with Files(target, folder, newest.num_servers, show) as files:
        for table in manifest.tables:
            if table.kind == "dense":
                files.copy(source, newest, table, "rows")
                tables.append(table)
                continue
            num = files.put(table.spec(), "rows", live_rows(source, manifest, table.name), _no_rows(table))
            files.put(table.spec(), "candidates", live_candidates(source, manifest, table.name), {})
            files.copy(source, newest, table, "sketch")
            tables.append(msgspec.structs.replace(table, rows=num))
        written = files.written()
    return msgspec.structs.replace(
        manifest, save=folder, parts=written, tables=tables, base=[], parent=0, version=VERSION
    )


def _no_rows(table: Table) -> parts.Arrays:
    return {"rows": np.empty((0, table.dim * (1 + table.num_states)), np.float32)}


def _replace(target: Storage, made: Manifest, compacted: list[Link] | None) -> Manifest:
    """The moment at which the full save becomes the model, or the beginning of its chain."""
    if not all(target.exists(f"{made.save}/{part.file}") for part in made.parts):
        raise CheckpointError(f"{target.place(made.save)} was removed while it was written; the model is as it was")
    if compacted is None:
        write_manifest(target, made)
        write_donefile(target, made)
        remove_others(target, made)
        return made
    now = read_manifest(target)
    first, later = now.links()[: len(compacted)], now.links()[len(compacted) :]
    if first != compacted:
        target.remove_folder(made.save)
        raise CheckpointError(
            f"{target.path} was saved to while it was compacted. The newer model stays as it is; compact it again."
        )
    made = msgspec.structs.replace(now, base=[*made.links(), *later[:-1]]) if later else made
    write_manifest(target, made)
    write_donefile(target, made)
    # Not all others: one of them may be a save that a job is making at this moment.
    old = {link.save for link in compacted} | {name for name in target.folders() if _COMPACTED.fullmatch(name)}
    for name in sorted(old - {link.save for link in made.links()}):
        target.remove_folder(name)
    return made


def _write(target: Storage, name: str, buffers: Sequence[Any]) -> None:
    try:
        target.write(name, buffers)
    except FleetError:
        raise
    except Exception as error:  # every file system has its own
        raise CheckpointError(f"cannot write to {target.path}: {type(error).__name__}: {error}") from error


class Files:
    """Part files of one folder, filled server by server and written by threads."""

    def __init__(self, target: Storage, folder: str, num_servers: int, show: Show) -> None:
        self._target, self._folder, self._num_servers, self._show = target, folder, num_servers, show
        self._pool = ThreadPoolExecutor(_UNDER_WAY)
        self._under_way: deque[Future[Part]] = deque()
        self._written: list[Part] = []

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def put(self, spec: TableSpec, kind: PartKind, live: Live, nothing: parts.Arrays) -> int:
        """Every row to a file of the server that owns it; returns how many. Files that stay empty are like `nothing`,
        or are not made if that is empty."""
        fillings = [Filling(spec.name, kind, server) for server in range(self._num_servers)]
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
            if not filling.pieces and not filling.number and nothing:
                filling.add({"keys": np.empty(0, np.uint64), **nothing})
            if filling.pieces:
                self._submit(filling)
        return num

    def copy(self, source: Storage, link: Link, table: Table, kind: PartKind) -> None:
        """Files that are whole in every save."""
        numbers: Counter[int] = Counter()
        for part, arrays in read_parts(source, link.save, link.parts_of(table.name, kind), lambda *both: both):
            filling = Filling(table.name, kind, part.part, numbers[part.part])
            numbers[part.part] += 1
            filling.pieces = {name: [array] for name, array in arrays.items()}
            self._submit(filling, part)

    def written(self) -> list[Part]:
        """All files, when they are on disk."""
        while self._under_way:
            self._written.append(self._under_way.popleft().result())
        return self._written

    def _submit(self, filling: Filling, like: Part | None = None) -> None:
        if len(self._under_way) >= _UNDER_WAY:
            self._written.append(self._under_way.popleft().result())
        num_rows, start = (like.rows, like.start) if like else (filling.num_rows, 0)
        part = Part(filling.table, filling.file, filling.server, num_rows, 0, 0, start, filling.kind)
        self._under_way.append(self._pool.submit(self._write, part, filling.pieces))
        filling.begin(filling.number + 1)

    def _write(self, part: Part, pieces: parts.Pieces) -> Part:
        buffers = parts.encode_pieces(pieces)
        _write(self._target, f"{self._folder}/{part.file}", buffers)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        return msgspec.structs.replace(part, bytes=size, crc32=parts.checksum(buffers))


class Filling:
    """The next file of one table, kind and server."""

    def __init__(self, table: str, kind: PartKind, server: int, number: int = 0) -> None:
        self.table, self.kind, self.server = table, kind, server
        self.begin(number)

    def begin(self, number: int) -> None:
        self.number, self.size, self.num_rows = number, 0, 0
        self.pieces: parts.Pieces = {}

    def takes(self, arrays: parts.Arrays) -> bool:
        """A file has the same tensors for all its keys; one that is half full does not become too large."""
        is_like = not self.pieces or set(self.pieces) == set(arrays)
        size = self.size + sum(array.nbytes for array in arrays.values())
        return is_like and (size <= PART_BYTES or self.size < PART_BYTES // 2)

    def add(self, arrays: parts.Arrays) -> None:
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
