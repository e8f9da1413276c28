"""A level: rows of all tables that changed together, as maps in one file that several processes map into memory.

The file holds, for each table, the secret of its hash, the slots of its map and its rows, `[key | values]`, as
kernels/hashmap.py defines them. Rows of keys that were removed come last. A file never changes once its level is
complete. A version's description holds a `LevelTable` for each table, which says where the table is in the file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError
from torchfleet.ps.kernels import hashmap, key_search
from torchfleet.ps.kernels.hashing import NUM_SECRETS, new_secret
from torchfleet.ps.kernels.hashmap import BUCKET, MOVED, NEXT_ROW, SECRET
from torchfleet.ps.kernels.levels import read_level
from torchfleet.ps.tables.rows.keymap import KEY_WORDS, MAX_LOAD, Keys

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]

CHUNK = 2048  # keys per call of a kernel, so that their rows stay in the cache
_SPARE_BUCKETS = 1 << 13  # behind the last home, at most: room for the longest run of full buckets by chance
_HEAD = 8 * NUM_SECRETS
_OWN: tuple[Literal["C"], Literal["W"]] = ("C", "W")  # kernels take contiguous arrays that are not read-only
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class LevelTable(msgspec.Struct, frozen=True):
    """A table's share of a level: where it is in the file, and how large."""

    name: str
    dim: int
    start: int  # byte of the file
    num_buckets: int
    num_slots: int
    num_alive: int
    num_rows: int  # with the removed keys, which come last


class Level(msgspec.Struct, frozen=True):
    """A level's file, and the tables in it. Tables without a row in it are left out."""

    file: str
    tables: list[LevelTable]

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self.tables)


class TableMap:
    """A table's hash map in mapped memory, with the arrays that the kernels of kernels/hashmap.py take."""

    def __init__(self, memory: mmap.mmap, table: LevelTable, offset: int) -> None:
        """`offset`: where the table begins in `memory`."""
        self.table, width = table, KEY_WORDS + table.dim
        slots_at = offset + _HEAD
        words_at = slots_at + 8 * table.num_slots
        self.slots: npt.NDArray[np.uint64] = np.frombuffer(memory, np.uint64, table.num_slots, slots_at)
        words = np.frombuffer(memory, np.uint32, table.num_rows * width, words_at)
        self.words: npt.NDArray[np.uint32] = words.reshape(-1, width)
        self.num_buckets = np.array([1, table.num_buckets], np.uint64)
        self.state = np.zeros(SECRET + NUM_SECRETS, np.int64)
        self.state[SECRET:] = np.frombuffer(memory, np.int64, NUM_SECRETS, offset)
        self.state[MOVED] = 1  # the map does not grow: all keys are in the new slots
        self.arrays = np.zeros(2 * BUCKET, np.uint64), self.slots, self.num_buckets, self.state, self.words

    def find(self, keys: Keys) -> Places:
        """The row of each key, -1 for a key that is not in this level."""
        at = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), CHUNK):
            key_search.find(*self.arrays, keys[start : start + CHUNK], at[start : start + CHUNK], KEY_WORDS)
        return at

    def read(self, keys: Keys, is_open: npt.NDArray[np.uint8], at: Places, out: Floats) -> int:
        """Write to `out` the rows of the open keys (those that no newer level has) that this level has, and close these
        keys. Returns how many keys stay open.
        """
        block = out.view(np.uint32)
        return int(read_level(*self.arrays, self.table.num_alive, keys, at, is_open, block))

    def chunks(self, start: int, stop: int, size: int = 1 << 16) -> Iterator[tuple[Keys, Floats]]:
        """Yield keys and values of the rows start..stop, in new arrays."""
        for first in range(start, stop, size):
            words = self.words[first : min(first + size, stop)]
            keys = np.ascontiguousarray(words[:, :KEY_WORDS]).view(np.uint64).reshape(-1)
            yield keys, np.ascontiguousarray(words[:, KEY_WORDS:]).view(np.float32)


ALIVE, OPEN, GONE = 0, 1, 2  # of a key: a level has its row, no level has the key, or it was removed


def open_own(folder: Path, name: str) -> BinaryIO:
    """Open a file of a folder of versions for reading. Raises CheckpointError if it is a link or in another folder."""
    if os.path.basename(name) != name:
        raise CheckpointError(f"{folder / name}: expected the name of a file in {folder}")
    try:
        return os.fdopen(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError(f"{folder / name} is a link: the files of a version are in their own folder") from None


class MappedLevel:
    """A complete level in memory. Pages are shared by all processes that map it, and are never written to.

    The file may be removed meanwhile: the system keeps its contents until the last process has unmapped it.
    """

    def __init__(self, folder: Path, level: Level) -> None:
        self.level = level
        with open_own(folder, level.file) as file:
            # Private and writable, as numba's kernels want it; without a write no page is copied.
            memory = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        self.tables = {table.name: TableMap(memory, table, table.start) for table in level.tables}


class LevelWriter:
    """Writes a level, table by table. Unless `finish` was called, the file is removed at the end of the block.

    Space is allocated before it is written to: a full disk raises OSError here, instead of a signal when a page is
    touched.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self._path, self._tables, self._end = folder / file, list[LevelTable](), 0
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._is_finished = False

    @contextlib.contextmanager
    def table(self, name: str, dim: int, max_rows: int) -> Iterator[TableWriter]:
        """Add a table of at most `max_rows` rows and removed keys."""
        if not max_rows:
            yield TableWriter.of_nothing(name, dim)
            return
        writer = TableWriter.in_file(self._file, self._end, name, dim, max_rows)
        yield writer
        found = writer.finished()
        if found.num_rows:
            self._tables.append(found)
            end = found.start + _HEAD + 8 * found.num_slots + 4 * (KEY_WORDS + dim) * found.num_rows
            self._end = -(-end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    def finish(self) -> Level:
        """Complete the file; returns its level."""
        os.ftruncate(self._file, max(self._end, mmap.PAGESIZE))
        self._is_finished = True
        return Level(self._path.name, self._tables)

    def __enter__(self) -> LevelWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        if not self._is_finished:
            self._path.unlink(missing_ok=True)


class TableWriter:
    """Fills one table of a level: rows first, then the keys that were removed."""

    def __init__(self, made: TableMap | None, name: str, dim: int) -> None:
        self._map, self._name, self._dim = made, name, dim
        self._num_alive: int | None = None

    @classmethod
    def of_nothing(cls, name: str, dim: int) -> TableWriter:
        return cls(None, name, dim)

    @classmethod
    def in_file(cls, file: int, start: int, name: str, dim: int, max_rows: int) -> TableWriter:
        num_buckets = int(max_rows / (MAX_LOAD * BUCKET)) + 1
        num_slots = BUCKET * (num_buckets + min(max_rows // BUCKET + 2, _SPARE_BUCKETS))
        size = _HEAD + 8 * num_slots + 4 * (KEY_WORDS + dim) * max_rows
        os.posix_fallocate(file, start, size)
        memory = mmap.mmap(file, size, offset=start)
        memory[:_HEAD] = new_secret().tobytes()
        return cls(TableMap(memory, LevelTable(name, dim, start, num_buckets, num_slots, 0, max_rows), 0), name, dim)

    def add(self, keys: Keys, values: Floats) -> None:
        """Add rows. Of equal keys the last one stays."""
        assert self._num_alive is None, "rows come before removed keys"
        self._load(keys, values)

    def add_gone(self, keys: Keys) -> None:
        """Add keys that were removed. Keys that have a row in this table keep it."""
        if self._num_alive is None:
            self._num_alive = self._num_rows
        if len(keys):
            assert self._map is not None
            keys = keys[self._map.find(np.require(keys, np.uint64, _OWN)) < 0]
            self._load(keys, np.zeros((len(keys), self._dim), np.float32))

    def finished(self) -> LevelTable:
        assert self._map is not None
        num_rows = self._num_rows
        num_alive = num_rows if self._num_alive is None else self._num_alive
        return msgspec.structs.replace(self._map.table, num_alive=num_alive, num_rows=num_rows)

    @property
    def _num_rows(self) -> int:
        return 0 if self._map is None else int(self._map.state[NEXT_ROW])

    def _load(self, keys: Keys, values: Floats) -> None:
        if not len(keys):
            return
        assert self._map is not None
        assert self._num_rows + len(keys) <= self._map.table.num_rows, "no room"
        made, block = self._map, np.require(values, np.float32, _OWN).view(np.uint32)
        hashmap.load(made.slots, made.num_buckets, made.state, made.words, np.require(keys, np.uint64, _OWN), block)


def rows_of(levels: list[TableMap], dim: int, keys: npt.NDArray[np.int64]) -> Floats:
    """The rows of `keys` in a stack of levels, newest first; zeros for a key without a row."""
    return read_rows(levels, dim, keys)[0]


def read_rows(levels: list[TableMap], dim: int, keys: npt.NDArray[np.int64]) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """(rows as rows_of returns them, for each key ALIVE, OPEN or GONE)."""
    out, is_open = np.zeros((len(keys), dim), np.float32), np.ones(len(keys), np.uint8)
    wanted = np.require(keys, np.int64, _OWN).view(np.uint64)
    for start in range(0, len(wanted), CHUNK):
        end = start + CHUNK
        at = np.empty(len(wanted[start:end]), np.int64)
        for level in levels:
            if not level.read(wanted[start:end], is_open[start:end], at, out[start:end]):
                break
    return out, is_open
