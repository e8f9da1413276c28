"""Saves and loads of a table in GPU memory beside training, in the files of servers, beside the bare disk.

python -m benchmarks.gpu_saves --json            20 million rows of dim 16 with Adam's state: 4 GB
python -m benchmarks.gpu_saves --quick --json    smaller, to see that it works (--device cpu: no GPU)
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import log, report
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest, read_manifest, write_manifest
from torchfleet.ps.checkpoint.part_reader import load_sparse
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.table_saves import TableSaves, described_tables, write_tables
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

_FILE = 1 << 25  # bytes, as those of saves
_WRITERS = 4  # as table_saves.py


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_saves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=200_000, help="rows of a step beside the save")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.batch = 50_000, 1000
    return chosen


def disk_bytes_per_s(folder: Path, num_bytes: int) -> float:
    """Plain files of the same size, written by as many threads, until the disk has them."""
    data = np.random.default_rng(0).bytes(_FILE)

    def write(number: int) -> None:
        with (folder / f"{number}").open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())

    start = time.perf_counter()
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(max(1, num_bytes // _FILE))))
    found = max(1, num_bytes // _FILE) * _FILE / (time.perf_counter() - start)
    for path in folder.iterdir():
        path.unlink()
    return found


def filled(chosen: argparse.Namespace) -> DeviceTable:
    table = DeviceTable(TableSpec("rows", dim=chosen.dim, rule=Rule("adam", 1e-3)), chosen.device, chosen.rows)
    for start in range(0, chosen.rows, 1 << 20):
        stop = min(start + (1 << 20), chosen.rows)
        table.find(torch.arange(start, stop, device=table.device) * 6364136223846793005, insert=True)
    return table


def save(storage: Storage, saves: TableSaves) -> None:
    saves.begin(1, 0, "full")
    parts = write_tables(storage, "save-000001", 0, {"rows": saves}, "full")
    tables = described_tables({"rows": saves}, True)
    write_manifest(storage, Manifest("save-000001", 1, "full", 1, tables, parts, token=1, num_files=len(parts)))


def saved_beside(chosen: argparse.Namespace, storage: Storage, table: DeviceTable) -> tuple[float, list[float]]:
    """(seconds of a save, those of the training steps that were made meanwhile)."""
    saves, seconds = TableSaves(table), list[float]()
    grads = torch.rand(chosen.batch, chosen.dim, device=table.device)
    ids = torch.randint(0, chosen.rows, (64, chosen.batch), device=table.device) * 6364136223846793005

    def step(number: int) -> None:
        table.push(table.find(ids[number % 64]), grads)
        if table.device.type == "cuda":
            torch.cuda.synchronize()

    for number in range(20):
        step(number)
    start = time.perf_counter()
    if table.device.type == "cpu":  # one thread uses a table on a CPU
        save(storage, saves)
        return time.perf_counter() - start, [0.0]
    thread = threading.Thread(target=save, args=(storage, saves))
    thread.start()
    number = 0
    while thread.is_alive():
        began, number = time.perf_counter(), number + 1
        step(number)
        seconds.append(time.perf_counter() - began)
    return time.perf_counter() - start, seconds


def main() -> None:
    chosen = options()
    table = filled(chosen)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        num_bytes = chosen.rows * (8 + 4 * table.layout.num_words)
        disk = disk_bytes_per_s(Path(folder), num_bytes)
        log(f"  disk: {disk / 1e9:.2f} GB/s")
        small = argparse.Namespace(**{**vars(chosen), "rows": 1000, "batch": 1000})
        saved_beside(small, Storage(f"{folder}/small"), filled(small))  # loads all kernels
        storage = Storage(f"{folder}/large")
        seconds, steps = saved_beside(chosen, storage, table)
        longest = 1000 * max(steps)
        when = sum(steps[: steps.index(max(steps))]) / max(sum(steps), 1e-9)
        log(f"  save: {num_bytes / seconds / 1e9:.2f} GB/s, {len(steps)} steps beside it, longest {longest:.1f} ms, at "
            f"{when:.0%} of the time")  # fmt: skip
        manifest = read_manifest(storage)
        other = DeviceTable(table.spec, chosen.device, chosen.rows)
        start = time.perf_counter()
        load_sparse(storage, manifest, TableSaves(other))
        load = time.perf_counter() - start
    result: dict[str, Any] = {
        "save_bytes_per_s": num_bytes / seconds,
        "save_of_disk": num_bytes / seconds / disk,
        "save_pause_ms": 1000 * (max(steps) - statistics.median(steps)),
        "step_ms": 1000 * statistics.median(steps),
        "load_bytes_per_s": num_bytes / load,
        "disk_bytes_per_s": disk,
        "bytes": num_bytes,
    }
    report({**result, "rows": chosen.rows, "dim": chosen.dim, "device": chosen.device}, chosen.json)


if __name__ == "__main__":
    main()
