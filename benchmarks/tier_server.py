"""A server with one table on two tiers, filled before it serves; started by benchmarks.tiers."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.timing import log
from torchfleet.ps.kernels.hashing import hashes
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.server.job.server_run import Place, ServerRun
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.tables.settings.table_size import parse_bytes
from torchfleet.ps.tables.tiered_table import TieredTable

PIECE = 400_000  # rows
HOT_SHARE = 10  # one of this many rows is hot: the first ones
STRIDE = 2_654_435_761  # a prime: the others follow each other as if at random


def spec(dim: int, memory: str, path: str | None) -> TableSpec:
    """Of a table on two tiers, or in memory."""
    storage = TierStorage(parse_bytes(memory, "--memory"), path) if path else TierStorage()
    first = Initializer("uniform", -0.01, 0.01)
    return TableSpec("rows", dim=dim, rule=Rule("rowwise_adagrad", lr=0.01), initializer=first, storage=storage)


class FilledServer(ServerProcess):
    """This program as a process. It listens when its table has all rows."""

    def __init__(self, rows: int, dim: int, memory: str, path: str) -> None:
        self._options = ["--rows", str(rows), "--dim", str(dim), "--memory", memory, "--path", path]
        super().__init__(timeout=7200.0)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        own = [sys.executable, "-m", "benchmarks.tier_server", *self._options]
        return subprocess.Popen(own, stdout=subprocess.PIPE, text=True)


def filling(rows: int, dim: int) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]]:
    """(keys, rows with state) of the ids 1 to `rows`: the lowest, which are used most, first, because the first rows
    fill the memory; then the others in an order that says nothing of how often they are used.
    """
    hot = max(1, rows // HOT_SHARE)
    while np.gcd(rows - hot, STRIDE) != 1:
        hot += 1
    values = np.random.default_rng(0).uniform(-0.01, 0.01, (PIECE, dim + 1)).astype(np.float32)
    values[:, dim] = 0.01  # the sum of squares
    for start in range(0, rows, PIECE):
        at = np.arange(start, min(start + PIECE, rows), dtype=np.uint64)
        spread = (at - np.uint64(hot)) * np.uint64(STRIDE) % np.uint64(rows - hot) + np.uint64(hot)
        ids = np.where(at < hot, at, spread)
        yield hashes(ids + np.uint64(1)), np.roll(values, start // PIECE, axis=0)[: len(at)]


def fill(table: TieredTable, rows: int, dim: int) -> None:
    """As a saved model is loaded: straight to the disk, once memory is full."""
    start, last = time.perf_counter(), 0.0
    table.reserve(rows)
    for keys, values in filling(rows, dim):
        table.load(keys, values)
        if time.perf_counter() - last > 15:
            last = time.perf_counter()
            log(f"  {table.num_rows:,} of {rows:,} rows after {last - start:.0f} s")
    seconds = time.perf_counter() - start
    log(f"  filled with {table.num_rows:,} rows in {seconds:.0f} s, {1e6 * seconds / rows:.2f} µs a row")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tier_server", description=__doc__)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--path", required=True)
    chosen = parser.parse_args()
    described = spec(chosen.dim, chosen.memory, chosen.path)
    run = ServerRun(Server(), Place())
    run.end_on(signal.SIGTERM)
    run.server.state.add_table(described)
    run.warm_up()
    table: Any = run.server.state.table(described.number)
    fill(table, chosen.rows, chosen.dim)
    listener = run.listen("tcp://127.0.0.1:0", None, False)
    run.open_status()
    print(f"listening on {listener.endpoint}", flush=True)
    run.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
