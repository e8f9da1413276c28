"""Random reads of other stores on disk: rocksdict (RocksDB) and lmdb, each where it is installed."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.timing import log
from torchfleet.ps.kernels.hashing import hashes

MOST_ROWS = 20_000_000  # filling them takes long; fewer rows are easier for them


def peers_rows_per_s(
    folder: str, rows: int, row_bytes: int, memory: int, batches: Sequence[np.ndarray]
) -> dict[str, float]:
    """Rows per second of those that are installed, with at most MOST_ROWS of the rows and that share of the memory."""
    num = min(rows, MOST_ROWS)
    keys = [hashes(1 + (np.arange(len(batch), dtype=np.uint64) * 7919 + i) % num) for i, batch in enumerate(batches)]
    found = {}
    for name, measure in (("rocksdict", _rocksdict), ("lmdb", _lmdb)):
        try:
            importlib.import_module(name)
        except ImportError:
            log(f"  {name} is not installed: pip install {name}")
            continue
        log(f"  {name}: {num:,} rows")
        found[f"{name}_rows_per_s"] = measure(str(Path(folder) / name), num, row_bytes, memory * num // rows, keys)
    return found


def _pieces(num: int, row_bytes: int) -> Iterator[tuple[list[bytes], bytes]]:
    for first in range(1, num + 1, 100_000):
        some = np.sort(hashes(np.arange(first, min(first + 100_000, num + 1), dtype=np.uint64)))
        yield [key.tobytes() for key in some.astype(">u8")], bytes(row_bytes)


def _timed(read: Callable[[list[bytes]], object], batches: Sequence[np.ndarray]) -> float:
    rates = []
    for batch in batches:
        wanted = [key.tobytes() for key in batch.astype(">u8")]
        start = time.perf_counter()
        read(wanted)
        rates.append(len(wanted) / (time.perf_counter() - start))
    return statistics.median(rates)


def _rocksdict(path: str, num: int, row_bytes: int, memory: int, batches: Sequence[np.ndarray]) -> float:
    from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch

    settings, blocks = Options(raw_mode=True), BlockBasedOptions()
    settings.create_if_missing(True)
    settings.set_use_direct_reads(True)
    blocks.set_block_cache(Cache(memory))
    blocks.set_bloom_filter(10, False)
    settings.set_block_based_table_factory(blocks)
    store = Rdict(path, settings)
    for keys, row in _pieces(num, row_bytes):
        batch = WriteBatch(raw_mode=True)
        for key in keys:
            batch.put(key, row)
        store.write(batch)
    store.flush()
    try:
        return _timed(lambda wanted: store[wanted], batches)  # its batched read
    finally:
        store.close()


def _lmdb(path: str, num: int, row_bytes: int, memory: int, batches: Sequence[np.ndarray]) -> float:
    """Its pages are in the page cache of the system: it has more memory than the others."""
    import lmdb

    with lmdb.open(path, map_size=max(1 << 30, 4 * num * row_bytes), sync=False, readahead=False) as store:
        for keys, row in _pieces(num, row_bytes):
            with store.begin(write=True) as change:
                change.cursor().putmulti([(key, row) for key in keys])
        with store.begin(buffers=True) as view:
            return _timed(lambda wanted: view.cursor().getmulti(wanted), batches)
