"""Tables larger than memory: training beside tables in memory and beside what the disk can read, and other stores.

python -m benchmarks.tiers --json            200 million rows in 4 GB of memory: about ten minutes, 36 GB of disk
python -m benchmarks.tiers --quick --json    a hundredth of the rows, to see that it works
python -m benchmarks.tiers --peers DIR --json    keep the files of other stores there; the next run uses them again

Rows of dim 16 with row-wise Adagrad, ids by a Zipf distribution. `training_samples_per_s`: pulls, sent two batches
ahead, and pushes of a client, through sockets, to a server whose rows are on two tiers; `memory_samples_per_s`: the
same to one with all rows in memory. `disk_samples_per_s`: the disk's random reads per second over the counted reads per
sample. `training_ratio`: to the smaller of the two. `read_ratio`: rows per second found by random keys, beside
the faster of rocksdict and lmdb with as much memory, where they are installed (pip install rocksdict lmdb).
`save_ratio`: a full save, beside reading the file of cold rows and writing as many bytes to the same disk, both at the
disk's sequential speed. `save_pause_ms`: the longest answer to a pull of one row during it.

The table is filled before the server serves, as by loading a saved model. The disk is measured before and after, and
the median of its random reads counts: virtual disks vary.
"""

from __future__ import annotations

import argparse
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

from benchmarks.tier_disk import disk_speed
from benchmarks.tier_peers import Wanted, peers_rows_per_s
from benchmarks.tier_server import FilledServer, spec
from benchmarks.timing import log, report
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import reserve
from torchfleet.ps.kernels.hashing import hashes
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.tables.settings.table_size import parse_bytes
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future

AHEAD = 2
NUM_KEYS, NUM_READS = 20_000, 5  # random rows: of a batch, and batches


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--memory", default="4GB", help="of the table on two tiers")
    parser.add_argument("--path", help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument(
        "--peers", metavar="DIR", help="folder for the files of other stores (default: a temporary one)"
    )
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


def draw_batches(chosen: argparse.Namespace, seed: int) -> list[np.ndarray]:
    """Ids of a Zipf distribution over all rows, as distinct hashed keys by batch."""
    draw, num, batches = np.random.default_rng(seed), 26 * chosen.batch, []
    for _ in range(chosen.batches):
        drawn = np.empty(0, np.int64)
        while len(drawn) < num:
            more = draw.zipf(chosen.zipf, num)
            drawn = np.append(drawn, more[more <= chosen.rows])
        batches.append(np.unique(hashes(drawn[:num].astype(np.uint64))))
    return batches


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
    found: dict[str, Any] = {
        name: value for name, value in vars(chosen).items() if name not in ("json", "path", "peers")
    }
    log("the disk")
    size = (1 << 28) if chosen.quick else (4 << 30)
    speed = disk_speed(folder, size)
    log(f"  {speed['disk_reads_per_s']:,.0f} reads/s; filling a table with {chosen.rows:,} rows")
    start = time.perf_counter()
    with (
        FilledServer(chosen.rows, chosen.dim, chosen.memory, folder) as server,
        Client.connect([server.endpoint], role=Role.LAUNCHER, window=2 * AHEAD + 2) as client,
    ):
        found["fill_s"] = time.perf_counter() - start
        described = spec(chosen.dim, chosen.memory, folder)
        client.attach(described)
        found |= measure_training(chosen, client)
        speed = middle(speed, disk_speed(folder, size))
        found |= {**speed, "server_rss_bytes": psutil.Process(server.pid).memory_info().rss}
        found["disk_samples_per_s"] = speed["disk_reads_per_s"] / found["reads_per_sample"]
        roof = min(found["memory_samples_per_s"], found["disk_samples_per_s"])
        found["training_ratio"] = found["training_samples_per_s"] / roof
        log(f"  training_ratio {found['training_ratio']:.2f}")
        found |= random_reads(client, chosen)
        log(f"  {found['random_rows_per_s']:,.0f} random rows/s; a full save")
        found |= save(client, described, server.endpoint, Path(folder) / "model", found["disk_bytes"], speed)
        log(f"  save_ratio {found['save_ratio']:.2f}, longest pause {found['save_pause_ms']:.0f} ms; other stores")
    shutil.rmtree(Path(folder) / "model", ignore_errors=True)
    wanted = Wanted(chosen.rows, 4 * (chosen.dim + 1), parse_bytes(chosen.memory, "--memory"), NUM_KEYS, NUM_READS)
    found |= peers_rows_per_s(chosen.peers or folder, wanted)
    others = [value for name, value in found.items() if name in ("rocksdict_rows_per_s", "lmdb_rows_per_s")]
    return {**found, **({"read_ratio": found["random_rows_per_s"] / max(others)} if others else {})}


def middle(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: (before[name] + after[name]) / 2 for name in before}


def measure_training(chosen: argparse.Namespace, client: Client) -> dict[str, Any]:
    """Rounds on two tiers and in memory, in turns, on the same batches."""
    tiered, in_memory, waits = [], [], []
    with ServerProcess() as other, Client.connect([other.endpoint], window=2 * AHEAD + 2) as plain:
        plain.create_table(spec(chosen.dim, chosen.memory, None))
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
    return {
        "training_samples_per_s": statistics.median(tiered),
        "memory_samples_per_s": statistics.median(in_memory),
        "reads_per_sample": (stats["rows_read"] - before) / (chosen.rounds * chosen.batches * chosen.batch),
        "pull_p50_ms": float(np.median(waits)),
        "pull_p99_ms": float(np.percentile(waits, 99)),
        **{name: stats[name] for name in ("hot_rows", "cold_rows", "disk_bytes")},
        "map_bytes_per_row": stats["map_bytes"] / stats["rows"],
    }


def random_reads(client: Client, chosen: argparse.Namespace) -> dict[str, float]:
    """Rows per second found by random keys, which stay where they are."""
    draw, rates = np.random.default_rng(9), []
    for _ in range(NUM_READS):
        keys = hashes(draw.integers(1, chosen.rows + 1, NUM_KEYS).astype(np.uint64))
        start = time.perf_counter()
        client.pull("rows", keys, create=False).result()
        rates.append(NUM_KEYS / (time.perf_counter() - start))
    return {"random_rows_per_s": statistics.median(rates)}


if __name__ == "__main__":
    main()
