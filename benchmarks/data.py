"""Reading: text and Parquet into batches on one core, through a pipe, and how much training waits for it.

python -m benchmarks.data --json            about two minutes
python -m benchmarks.data --quick --json    smaller and shorter, to see that it works
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

import torchfleet as fleet
from benchmarks.ctr_data import write_multislot, write_parquet, write_raw
from benchmarks.timing import interleave, log, report
from examples.ctr_dnn.model import CTRDNN, loss_of, slots
from torchfleet.data.queue_dataset import QueueDataset
from torchfleet.data.reading.parquet import ROWS

BATCH = 1000


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--training_rows", type=int, default=60_000, help="of one run of the training comparison")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.training_rows, chosen.rounds = 40_000, 10_000, 1
    return chosen


def dataset(files: list[str], **how: Any) -> QueueDataset:
    made = QueueDataset()
    made.init(batch_size=BATCH, thread_num=1, use_var=slots(ragged="data_format" not in how), **how)
    made.set_filelist(files)
    return made


def rows_per_s(made: QueueDataset) -> float:
    start = time.perf_counter()
    num = sum(batch.num_samples for batch in made)
    return num / (time.perf_counter() - start)


def on_one_core(measure: Callable[[], float]) -> float:
    """Reader and taker share one core: what a core can do, and not what two can."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # threads started from here on inherit it
    try:
        return measure()
    finally:
        os.sched_setaffinity(0, allowed)


def arrow_rows_per_s(files: list[str]) -> float:
    """pyarrow alone: the same pieces read and decoded, and nothing made of them. No reader of Parquet can be faster."""
    start, num = time.perf_counter(), 0
    for path in files:
        for piece in pq.ParquetFile(path).iter_batches(batch_size=-(-ROWS // BATCH) * BATCH, use_threads=False):
            num += piece.num_rows
    return num / (time.perf_counter() - start)


def reading(chosen: argparse.Namespace, raw: list[str], text: list[str], parquet: list[str]) -> dict[str, float]:
    criteo, columns = fleet.CriteoFormat(), fleet.ParquetFormat()
    contenders: dict[str, Callable[[], float]] = {
        "multislot": lambda: on_one_core(lambda: rows_per_s(dataset(text))),
        "criteo": lambda: on_one_core(lambda: rows_per_s(dataset(raw, data_format=criteo))),
        "parquet": lambda: on_one_core(lambda: rows_per_s(dataset(parquet, data_format=columns))),
        "pyarrow": lambda: on_one_core(lambda: arrow_rows_per_s(parquet)),
        "direct": lambda: rows_per_s(dataset(text)),
        "piped": lambda: rows_per_s(dataset(text, pipe_command="cat")),
    }
    for measure in contenders.values():
        measure()  # kernels, and the files into the page cache
    return interleave(chosen.rounds, contenders)


def training(chosen: argparse.Namespace, raw: list[str]) -> dict[str, float]:
    """Samples per second of a CTR-DNN in this process: from files, and from batches that are in memory already."""
    torch.set_num_threads(1)
    fleet.init()
    model = fleet.distributed_model(CTRDNN())
    strategy = fleet.DistributedStrategy(a_sync=True)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), strategy)
    fleet.init_worker()
    ready = list(dataset(raw, data_format=fleet.CriteoFormat()))
    ready = [batch for batch in ready if batch.num_samples == BATCH][: chosen.training_rows // BATCH]

    def from_files() -> float:
        files = fleet.QueueDataset()
        files.init(batch_size=BATCH, use_var=slots(), data_format=fleet.CriteoFormat())
        files.set_filelist(raw)
        start, num = time.perf_counter(), 0
        batches = iter(files)
        for batch in fleet.prefetch(batches):
            num += step(batch)
            if num >= chosen.training_rows:
                break
        seconds = time.perf_counter() - start
        batches.close()
        return num / seconds

    def from_memory() -> float:
        start = time.perf_counter()
        num = sum(step(batch) for batch in fleet.prefetch(ready))
        return num / (time.perf_counter() - start)

    def step(batch: Any) -> int:
        loss_of(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return int(batch.num_samples)

    from_memory()
    found = interleave(chosen.rounds, {"training_from_files": from_files, "training_from_memory": from_memory})
    fleet.stop_worker()
    return found


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory() as folder:
        log(f"writing {chosen.rows:,} rows")
        raw = write_raw(Path(folder), chosen.rows, 4)
        text = write_multislot(Path(folder), raw)
        parquet = write_parquet(Path(folder), raw)
        bytes_per_line = sum(os.path.getsize(path) for path in text) / chosen.rows
        bytes_per_row = sum(os.path.getsize(path) for path in raw) / chosen.rows
        log("reading")
        found = reading(chosen, raw, text, parquet)
        log("training")
        trained = training(chosen, raw)
    report(
        {
            "multislot_lines_per_s_per_core": found["multislot"],
            "criteo_rows_per_s_per_core": found["criteo"],
            "parquet_rows_per_s_per_core": found["parquet"],
            "parquet_to_multislot_ratio": found["parquet"] / found["multislot"],
            "parquet_to_pyarrow_ratio": found["parquet"] / found["pyarrow"],
            "read_mb_per_s": found["multislot"] * bytes_per_line / 1e6,
            "criteo_mb_per_s": found["criteo"] * bytes_per_row / 1e6,
            "pipe_overhead_ratio": found["piped"] / found["direct"],
            "training_ratio": trained["training_from_files"] / trained["training_from_memory"],
            **trained,
            "bytes_per_line": bytes_per_line,
            "rows": chosen.rows,
            "batch": BATCH,
            "rounds": chosen.rounds,
        },
        chosen.json,
    )


if __name__ == "__main__":
    main()
