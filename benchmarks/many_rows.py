"""As many rows as memory holds: filled, trained, saved and loaded, in seconds per billion rows.

python -m benchmarks.many_rows --memory 16 --folder DIR --json    16 GB of rows on one server; a save of the same size
python -m benchmarks.many_rows --quick --json                     smaller, to see that it works

Rows have dim 8 in bfloat16 and SGD, which has no state: 16 bytes each, and their place in the map. One server process;
the client fills by pulls of new keys, and trains by pulls and pushes of keys that are drawn at random. The table grows
until it would exceed the memory, or until --seconds have passed. Loading is that of a server that starts: it has ended
the first one, and the files are out of the page cache.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.checkpoint import forget
from benchmarks.timing import log, report
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import reserve
from torchfleet.ps.checkpoint.manifest import Manifest, described, folder_of, write_manifest
from torchfleet.ps.checkpoint.part_reader import load_sparse
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.rows.memory import physical_bytes
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client

CHUNK = 1 << 17
SPEC = TableSpec(
    "rows",
    dim=8,
    rule=Rule("sgd", 0.1),
    initializer=Initializer("uniform", -0.1, 0.1),
    format=RowFormat(dtype="bfloat16"),
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_rows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--memory", type=float, default=16, help="GB that the server may take")
    parser.add_argument("--seconds", type=float, default=120, help="at most, to fill")
    parser.add_argument("--steps", type=int, default=200, help="pulls and pushes of 131,072 keys")
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.memory, chosen.seconds, chosen.steps = 0.3, 5, 20
    return chosen


def fill(client: Client, process: psutil.Process, chosen: argparse.Namespace) -> tuple[int, float]:
    """(rows, seconds). A map doubles when it is full, so that it ends before one that would not fit."""
    began, num_rows = time.perf_counter(), 0
    while time.perf_counter() - began < chosen.seconds:
        if num_rows % (32 * CHUNK) == 0 and process.memory_info().rss > 0.97 * 1e9 * chosen.memory:
            break
        keys = np.arange(num_rows, num_rows + CHUNK, dtype=np.uint64)
        client.pull("rows", keys).result()
        num_rows += CHUNK
    return num_rows, time.perf_counter() - began


def train(client: Client, num_rows: int, num_steps: int) -> float:
    """Seconds of these steps."""
    rng, began = np.random.default_rng(0), time.perf_counter()
    for _ in range(num_steps):
        keys = np.unique(rng.integers(0, num_rows, CHUNK).astype(np.uint64))
        values = client.pull("rows", keys).result()
        client.push("rows", keys, values).result()
    return time.perf_counter() - began


def save(client: Client, storage: Storage, num_rows: int) -> tuple[float, Manifest]:
    began, token = time.perf_counter(), secrets.randbits(62) + 1
    with reserve(storage, 1, token) as held:
        saved = client.save(storage.path, held.folder, True, 900.0, token=token)
        held.release()
    seconds = time.perf_counter() - began
    table = described(SPEC, True, saved[0].steps["rows"], num_rows, [])
    manifest = Manifest(folder_of(1), 1, "full", 1, [table], saved[0].parts)
    write_manifest(storage, manifest)
    return seconds, manifest


def load(storage: Storage, manifest: Manifest, num_rows: int) -> float:
    forget(*(Path(storage.place(f"{manifest.save}/{part.file}")) for part in manifest.parts))
    table, began = SparseTable(SPEC, physical_bytes()), time.perf_counter()
    load_sparse(storage, manifest, table)
    seconds = time.perf_counter() - began
    if table.num_rows != num_rows:
        raise SystemExit(f"expected {num_rows:,} rows after loading, found {table.num_rows:,}")
    return seconds


def measure(chosen: argparse.Namespace, storage: Storage) -> dict[str, Any]:
    with ServerProcess("tcp://127.0.0.1:0") as server, Client.connect([server.endpoint], role=Role.LAUNCHER) as client:
        process = psutil.Process(server.pid)
        client.create_table(SPEC)
        num_rows, filling = fill(client, process, chosen)
        memory = process.memory_info().rss
        log(f"{num_rows:,} rows in {filling:.1f} s, {memory / num_rows:.1f} bytes of memory each")
        training = train(client, num_rows, chosen.steps)
        log(f"{chosen.steps} steps in {training:.1f} s")
        saving, manifest = save(client, storage, num_rows)
        log(f"saved in {saving:.1f} s")
    loading = load(storage, manifest, num_rows)
    billions = num_rows / 1e9
    return {
        "rows": num_rows,
        "memory_gb": memory / 1e9,
        "bytes_per_row": memory / num_rows,
        "saved_bytes_per_row": sum(part.bytes for part in manifest.parts) / num_rows,
        "fill_s_per_billion": filling / billions,
        "trained_keys_per_s": chosen.steps * CHUNK / training,
        "save_s_per_billion": saving / billions,
        "load_s_per_billion": loading / billions,
    }


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        found = measure(chosen, Storage(str(Path(folder) / "model")))
    report({**found, **{name: getattr(chosen, name) for name in ("memory", "seconds", "steps")}}, chosen.json)


if __name__ == "__main__":
    main()
