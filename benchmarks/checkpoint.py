"""Saving and loading a large table, beside what the disk does with plain bytes; and what a save does to requests.

python -m benchmarks.checkpoint --json --folder DIR     20 million rows x dim 10 with Adam state: 2.6 GB in DIR
python -m benchmarks.checkpoint --quick --json          smaller, to see that it works
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.steady_pulls import SteadyPulls
from benchmarks.timing import log, report
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import reserve
from torchfleet.ps.checkpoint.manifest import Manifest, described, folder_of, write_manifest
from torchfleet.ps.checkpoint.part_reader import load_sparse
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.rows.memory import physical_bytes
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client

CHUNK = 1 << 17
PULL = 1000  # rows
SPEC = TableSpec("rows", dim=10, rule=Rule("adam", 1e-3, eps=1e-8), initializer=Initializer("uniform", -0.1, 0.1))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows = 500_000
    return chosen


def disk_speed(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Bytes per second that dd writes (with fdatasync) and reads (past the page cache)."""
    path, count = folder / "dd", max(1, num_bytes >> 20)
    write = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={count}", "conv=fdatasync"]
    written = timed(lambda: subprocess.run(write, check=True, capture_output=True, timeout=900))
    forget(path)
    read = timed(lambda: subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=1M"], check=True, capture_output=True))
    path.unlink()
    return (count << 20) / written, (count << 20) / read


def forget(*paths: Path) -> None:
    """Take files out of the page cache, so that reading them is reading the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def save(chosen: argparse.Namespace, storage: Storage) -> tuple[dict[str, float], Manifest]:
    with ServerProcess("tcp://127.0.0.1:0") as server, Client.connect([server.endpoint], role=Role.LAUNCHER) as client:
        client.create_table(SPEC)
        rng = np.random.default_rng(1)
        for start in range(0, chosen.rows, CHUNK):
            keys = np.arange(start, min(start + CHUNK, chosen.rows), dtype=np.uint64)
            client.push("rows", keys, rng.standard_normal((len(keys), 10), np.float32)).result()
        process = psutil.Process(server.pid)
        table_bytes = client.stats()[0]["tables"]["rows"]["bytes"]
        with SteadyPulls(server.endpoint, SPEC, chosen.rows, PULL) as quiet:
            time.sleep(3)
        before, peak = process.memory_info().rss, [0]
        over = threading.Event()
        watch = threading.Thread(target=lambda: watch_memory(process, peak, over))
        watch.start()
        with SteadyPulls(server.endpoint, SPEC, chosen.rows, PULL) as busy:
            began = time.perf_counter()
            token = secrets.randbits(62) + 1
            with reserve(storage, 1, token) as held:
                saved = client.save(storage.path, held.folder, True, 900.0, token=token)
                held.release()
            seconds = time.perf_counter() - began
        over.set()
        watch.join()
    num_bytes = sum(part.bytes for part in saved[0].parts)
    table = described(SPEC, True, saved[0].steps["rows"], chosen.rows, [])
    manifest = Manifest(folder_of(1), 1, "full", 1, [table], saved[0].parts)
    write_manifest(storage, manifest)
    found = {
        "save_mb_per_s": num_bytes / seconds / 1e6,
        "bytes": num_bytes,
        "save_memory_ratio": max(0, peak[0] - before) / table_bytes,
        "pull_p50_ms": float(np.percentile(quiet.times, 50)),
        "pull_p50_while_saving_ms": float(np.percentile(busy.times, 50)),
        "pull_p99_while_saving_ms": float(np.percentile(busy.times, 99)),
        "longest_pull_while_saving_ms": max(busy.times),
    }
    return found, manifest


def watch_memory(process: psutil.Process, peak: list[int], over: threading.Event) -> None:
    while not over.wait(0.02):
        peak[0] = max(peak[0], process.memory_info().rss)


def load(storage: Storage, manifest: Manifest, num_rows: int) -> dict[str, float]:
    forget(*(Path(storage.place(f"{manifest.save}/{part.file}")) for part in manifest.parts))
    process, peak, over = psutil.Process(), [0], threading.Event()
    table = SparseTable(SPEC, physical_bytes())
    before = process.memory_info().rss
    watch = threading.Thread(target=lambda: watch_memory(process, peak, over))
    watch.start()
    seconds = timed(lambda: load_sparse(storage, manifest, table))
    over.set()
    watch.join()
    held = table.stats()["bytes"]
    assert table.stats()["rows"] == num_rows
    num_bytes = sum(part.bytes for part in manifest.parts)
    return {"load_mb_per_s": num_bytes / seconds / 1e6, "load_memory_ratio": max(0.0, (peak[0] - before) / held - 1)}


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        storage = Storage(str(Path(folder) / "model"))
        num_bytes = chosen.rows * 128
        log("dd")
        first = disk_speed(Path(folder), num_bytes)
        log(f"making and saving {chosen.rows:,} rows")
        found, manifest = save(chosen, storage)
        log("loading")
        found.update(load(storage, manifest, chosen.rows))
        second = disk_speed(Path(folder), num_bytes)
    write, read = ((a + b) / 2 / 1e6 for a, b in zip(first, second, strict=True))
    found.update({"dd_write_mb_per_s": write, "dd_read_mb_per_s": read})
    found.update({"save_ratio": found["save_mb_per_s"] / write, "load_ratio": found["load_mb_per_s"] / read})
    report({**found, "rows": chosen.rows}, chosen.json)


if __name__ == "__main__":
    main()
