"""Random reads of other stores on disk: rocksdict (RocksDB) and lmdb, each where it is installed.

Each has MOST_ROWS of the rows at most, that share of the memory, and a file that was written in the order of its keys,
which is the best for it. Before the clock runs, it has read as many random rows as its memory has pages of 4 KiB.
"""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.timing import log
from torchfleet.ps.kernels.hashing import hashes

MOST_ROWS = 20_000_000  # filling them takes long; fewer rows are easier for them
PIECE = 100_000
Read = Callable[[list[bytes]], int]  # returns how many keys were found


@dataclass(frozen=True)
class Wanted:
    """What a store is asked for."""

    num_rows: int
    row_bytes: int
    memory: int
    num_keys: int  # of a batch
    num_batches: int


def peers_rows_per_s(folder: str, wanted: Wanted) -> dict[str, float]:
    """Rows per second of those that are installed. Files that an earlier call has filled in `folder` are used again."""
    share = min(1.0, MOST_ROWS / wanted.num_rows)
    own = Wanted(
        int(share * wanted.num_rows), wanted.row_bytes, int(share * wanted.memory), wanted.num_keys, wanted.num_batches
    )
    found = {}
    for name, measure in (("rocksdict", _rocksdict), ("lmdb", _lmdb)):
        try:
            importlib.import_module(name)
        except ImportError:
            log(f"  without {name}, which is not installed: pip install {name}")
            continue
        log(f"  {name}: {own.num_rows:,} rows")
        found[f"{name}_rows_per_s"] = measure(Path(folder), own)
        log(f"  {name}: {found[f'{name}_rows_per_s']:,.0f} rows/s")
    return found


def _filled(folder: Path, name: str, wanted: Wanted, fill: Callable[[str], None]) -> str:
    """The place of a filled store; fills it, unless that was done before."""
    place = folder / f"{name}-{wanted.num_rows}-{wanted.row_bytes}"
    mark = place.with_suffix(".filled")
    if not mark.exists():
        shutil.rmtree(place, ignore_errors=True)
        start = time.perf_counter()
        fill(str(place))
        mark.touch()
        log(f"  {name}: filled in {time.perf_counter() - start:.0f} s")
    return str(place)


def _pieces(wanted: Wanted) -> Iterator[tuple[list[bytes], bytes]]:
    keys = np.sort(hashes(np.arange(1, wanted.num_rows + 1, dtype=np.uint64)))
    row = bytes(range(wanted.row_bytes))
    for first in range(0, wanted.num_rows, PIECE):
        yield _texts(keys[first : first + PIECE]), row


def _texts(keys: npt.NDArray[np.uint64]) -> list[bytes]:
    """Keys as bytes that are ordered as the numbers are."""
    data = keys.astype(">u8").tobytes()
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def _timed(read: Read, wanted: Wanted) -> float:
    """The median over batches, after random reads that fill the memory."""
    draw, rates = np.random.default_rng(9), []

    def batch() -> list[bytes]:
        drawn = draw.integers(1, wanted.num_rows + 1, wanted.num_keys).astype(np.uint64)
        return _texts(hashes(drawn))

    for _ in range(wanted.memory // 4096 // wanted.num_keys):
        read(batch())
    for _ in range(wanted.num_batches):
        keys = batch()
        start = time.perf_counter()
        found = read(keys)
        rates.append(len(keys) / (time.perf_counter() - start))
        assert found == len(keys), f"{found:,} of {len(keys):,} keys were found"
    return statistics.median(rates)


def _rocksdict(folder: Path, wanted: Wanted) -> float:
    from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch

    settings, blocks = Options(raw_mode=True), BlockBasedOptions()
    settings.create_if_missing(True)
    settings.set_use_direct_reads(True)
    blocks.set_block_cache(Cache(wanted.memory))
    blocks.set_bloom_filter(10, False)
    settings.set_block_based_table_factory(blocks)

    def fill(place: str) -> None:
        store = Rdict(place, settings)
        for keys, row in _pieces(wanted):
            batch = WriteBatch(raw_mode=True)
            for key in keys:
                batch.put(key, row)
            store.write(batch)
        store.flush()
        store.close()

    store = Rdict(_filled(folder, "rocksdict", wanted, fill), settings)
    try:
        return _timed(lambda keys: sum(row is not None for row in store[keys]), wanted)  # its batched read
    finally:
        store.close()


def _lmdb(folder: Path, wanted: Wanted) -> float:
    """Its memory is the page cache of the system, which is emptied of its file first."""
    import lmdb

    size = max(1 << 30, 4 * wanted.num_rows * wanted.row_bytes)

    def fill(place: str) -> None:
        with lmdb.open(place, map_size=size, sync=False) as store:
            for keys, row in _pieces(wanted):
                with store.begin(write=True) as change:
                    change.cursor().putmulti([(key, row) for key in keys], append=True)
            store.sync(True)

    place = _filled(folder, "lmdb", wanted, fill)
    with open(Path(place) / "data.mdb", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with lmdb.open(place, map_size=size, readahead=False) as store, store.begin(buffers=True) as view:
        return _timed(lambda keys: len(view.cursor().getmulti(keys)), wanted)
