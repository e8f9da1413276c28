"""Tables larger than memory: training beside tables in memory and beside what the disk can read, and other stores.

python -m benchmarks.tiers --json            200 million rows in 4 GB of memory: about half an hour, 40 GB of disk
python -m benchmarks.tiers --quick --json    a hundredth of the rows, to see that it works

Rows of dim 16 with row-wise Adagrad, ids by a Zipf distribution. `training_samples_per_s`: pulls, sent two batches
ahead, and pushes of a client, through sockets, to a server whose rows are on two tiers; `memory_samples_per_s`: the
same to one with all rows in memory. `disk_samples_per_s`: the disk's random reads per second over the counted reads per
sample. `training_ratio`: to the smaller of the two. `read_ratio`: rows per second found by random keys, beside
the faster of rocksdict and lmdb with as much memory, where they are installed. `save_ratio`: a full save, beside
reading the file of cold rows and writing as many bytes to the same disk, both at the disk's sequential speed.
`save_pause_ms`: the longest answer to a pull of one row during it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.tier_peers import peers_rows_per_s
from benchmarks.timing import log, report
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import reserve
from torchfleet.ps.kernels.hashing import hashes
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.process import ServerProcess
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage
from torchfleet.ps.tables.settings.table_size import parse_bytes
from torchfleet.ps.tables.tiers.disk import open_disk
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future

AHEAD = 2


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--memory", default="4GB", help="of the table on two tiers")
    parser.add_argument("--path", help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--zipf", type=float, default=1.15)
    parser.add_argument("--batch", type=int, default=4096, help="samples of 26 ids")
    parser.add_argument("--batches", type=int, default=300, help="of each round of training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the rows")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.memory, chosen.batches, chosen.rounds = chosen.rows // 100, "80MiB", 60, 1
    return chosen


def spec(chosen: argparse.Namespace, path: str | None) -> TableSpec:
    storage = TierStorage(parse_bytes(chosen.memory, "--memory"), path) if path else TierStorage()
    first = Initializer("uniform", -0.01, 0.01)
    return TableSpec("rows", dim=chosen.dim, rule=Rule("rowwise_adagrad", lr=0.01), initializer=first, storage=storage)


def draw_batches(chosen: argparse.Namespace, seed: int) -> list[np.ndarray]:
    """Ids of a Zipf distribution over all rows, as distinct hashed keys by batch."""
    draw, num, batches = np.random.default_rng(seed), 26 * chosen.batch, []
    for _ in range(chosen.batches):
        drawn = draw.zipf(chosen.zipf, 2 * num)
        drawn = drawn[drawn <= chosen.rows][:num]
        batches.append(np.unique(hashes(drawn.astype(np.uint64))))
    return batches


def fill(client: Client, chosen: argparse.Namespace) -> float:
    """All rows by pulls that create them, the least used ones first, as if long in training; returns the seconds."""
    start = time.perf_counter()
    under_way: deque[Future[Any]] = deque()
    for num, last in enumerate(range(chosen.rows, 0, -100_000), 1):
        keys = hashes(np.arange(max(1, last - 99_999), last + 1, dtype=np.uint64))
        under_way.append(client.pull("rows", keys))
        if len(under_way) > AHEAD:
            under_way.popleft().result()
        if num % 200 == 0:
            log(f"  {100_000 * num:,} rows after {time.perf_counter() - start:.0f} s")
    for future in under_way:
        future.result()
    return time.perf_counter() - start


def train(client: Client, batches: Sequence[np.ndarray], batch: int) -> tuple[float, list[float]]:
    """(samples per second, milliseconds of each pull). The ids are drawn before: that takes longer than a step."""
    pulls: deque[tuple[Any, Future[Any], float]] = deque()
    pushes: deque[Future[Any]] = deque()
    waits = []
    start = time.perf_counter()
    for keys in batches:
        pulls.append((keys, client.pull("rows", keys), time.perf_counter()))
        if len(pulls) <= AHEAD:
            continue
        pulled, future, asked = pulls.popleft()
        rows = future.result()
        waits.append(1000 * (time.perf_counter() - asked))
        pushes.append(client.push("rows", pulled, 0.01 * rows))
        if len(pushes) > AHEAD:
            pushes.popleft().result()
    for future in (*(pull for _, pull, _ in pulls), *pushes):
        future.result()
    return len(batches) * batch / (time.perf_counter() - start), waits


def disk_speed(folder: str, num_bytes: int) -> dict[str, float]:
    """Random reads of 4 KiB and sequential bytes per second of the disk, past the page cache."""
    file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
    disk, size = open_disk(file), 1 << 20
    blocks = np.frombuffer(mmap.mmap(-1, 64 * size), np.uint8).reshape(64, size)
    blocks[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    start = time.perf_counter()
    for first in range(0, num_bytes, 64 * size):
        for i in range(64):
            disk.begin_write(i, first + i * size, blocks[i])
        ended = 0
        while ended < 64:
            ended += len(disk.end_writes(1))
    written = num_bytes / (time.perf_counter() - start)
    start = time.perf_counter()
    for first in range(0, num_bytes, 64 * size):
        disk.read(first + size * np.arange(64), blocks)
    read = num_bytes / (time.perf_counter() - start)
    pages, draw = np.frombuffer(mmap.mmap(-1, 4096 * 4096), np.uint8).reshape(4096, 4096), np.random.default_rng(1)
    rates = []
    for _ in range(5):
        offsets, start = 4096 * draw.integers(0, num_bytes // 4096, 4096), time.perf_counter()
        disk.read(offsets, pages)
        rates.append(4096 / (time.perf_counter() - start))
    disk.close()
    os.close(file)
    found = {"disk_write_bytes_per_s": written, "disk_read_bytes_per_s": read}
    return {**found, "disk_reads_per_s": statistics.median(rates)}


def save(
    client: Client, described: TableSpec, endpoint: str, folder: Path, num_bytes: int, speed: dict[str, float]
) -> dict[str, float]:
    """A full save, and how long a small pull waits during it."""
    waits, is_over = [0.0], threading.Event()

    def look() -> None:
        with Client.connect([endpoint]) as other:
            other.attach(described)
            while not is_over.is_set():
                asked = time.perf_counter()
                other.pull("rows", hashes(np.ones(1, np.uint64)), create=False).result()
                waits.append(1000 * (time.perf_counter() - asked))
                time.sleep(0.005)

    watcher = threading.Thread(target=look)
    watcher.start()
    start = time.perf_counter()
    storage, token = Storage(str(folder)), secrets.randbits(62) + 1
    with reserve(storage, 1, token) as held:
        client.save(storage.path, held.folder, True, 3600.0, token=token)
        held.release()
    seconds = time.perf_counter() - start
    is_over.set()
    watcher.join()
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    roof = num_bytes / speed["disk_read_bytes_per_s"] + written / speed["disk_write_bytes_per_s"]
    return {"save_s": seconds, "save_bytes": float(written), "save_ratio": roof / seconds, "save_pause_ms": max(waits)}


def main() -> None:
    chosen = options()
    folder = tempfile.mkdtemp(dir=chosen.path)
    try:
        report(measure(chosen, folder), chosen.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(chosen: argparse.Namespace, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: value for name, value in vars(chosen).items() if name not in ("json", "path")}
    log("the disk")
    speed = disk_speed(folder, (1 << 28) if chosen.quick else (4 << 30))
    with (
        ServerProcess() as server,
        Client.connect([server.endpoint], role=Role.LAUNCHER, window=2 * AHEAD + 2) as client,
    ):
        client.create_table(spec(chosen, folder))
        log(f"filling a table with {chosen.rows:,} rows")
        found["fill_s"] = fill(client, chosen)
        tiered, in_memory, waits = [], [], []
        with ServerProcess() as other, Client.connect([other.endpoint], window=2 * AHEAD + 2) as plain:
            plain.create_table(spec(chosen, None))
            first = draw_batches(chosen, 0)
            train(client, first, chosen.batch)  # memory gets the rows that are used most
            train(plain, first, chosen.batch)
            before = client.stats()[0]["tables"]["rows"]["rows_read"]
            for turn in range(chosen.rounds):
                batches = draw_batches(chosen, 1 + turn)
                samples, some = train(client, batches, chosen.batch)
                tiered.append(samples)
                waits += some
                in_memory.append(train(plain, batches, chosen.batch)[0])
                log(f"  round {turn + 1}: {tiered[-1]:,.0f} samples/s on two tiers, {in_memory[-1]:,.0f} in memory")
        stats = client.stats()[0]["tables"]["rows"]
        reads = (stats["rows_read"] - before) / (chosen.rounds * chosen.batches * chosen.batch)
        found |= {
            "training_samples_per_s": statistics.median(tiered),
            "memory_samples_per_s": statistics.median(in_memory),
            "disk_samples_per_s": speed["disk_reads_per_s"] / reads,
            "reads_per_sample": reads,
            "pull_p50_ms": float(np.median(waits)),
            "pull_p99_ms": float(np.percentile(waits, 99)),
            "hot_rows": stats["hot_rows"],
            "cold_rows": stats["cold_rows"],
            "disk_bytes": stats["disk_bytes"],
            "map_bytes_per_row": stats["map_bytes"] / stats["rows"],
            "server_rss_bytes": psutil.Process(server.pid).memory_info().rss,
            **speed,
        }
        roof = min(found["memory_samples_per_s"], found["disk_samples_per_s"])
        found["training_ratio"] = found["training_samples_per_s"] / roof
        log(f"training_ratio {found['training_ratio']:.2f}; a full save")
        found |= save(client, spec(chosen, folder), server.endpoint, Path(folder) / "model", stats["disk_bytes"], speed)
        shutil.rmtree(Path(folder) / "model", ignore_errors=True)
        found |= measure_reads(client, chosen, folder)
    return found


def measure_reads(client: Client, chosen: argparse.Namespace, folder: str) -> dict[str, float]:
    """Random rows per second, beside other stores with the same keys."""
    draw, num = np.random.default_rng(9), 20_000
    batches = [hashes(draw.integers(1, chosen.rows + 1, num).astype(np.uint64)) for _ in range(5)]
    rates = []
    for keys in batches:
        start = time.perf_counter()
        client.pull("rows", keys, create=False).result()
        rates.append(num / (time.perf_counter() - start))
    found = {"random_rows_per_s": statistics.median(rates)}
    memory, row_bytes = parse_bytes(chosen.memory, "--memory"), 4 * (chosen.dim + 1)
    found |= peers_rows_per_s(folder, chosen.rows, row_bytes, memory, batches)
    others = [value for name, value in found.items() if name.startswith(("rocksdict", "lmdb"))]
    return {**found, **({"read_ratio": found["random_rows_per_s"] / max(others)} if others else {})}


if __name__ == "__main__":
    main()
