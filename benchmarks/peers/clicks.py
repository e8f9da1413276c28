"""What all contenders share: generated clicks, in numpy alone; the network's size; and what a run reports.

Rows have 26 ids, by Zipf's law, and 13 numbers; a planted signal decides which are clicked. The model is one table of
dim numbers per id, and a tower of 26 × dim + 13 → 128 → 1. First values: rows uniform within 0.01, drawn by each
contender; the tower's as torch draws them with the seed, or as its rival draws them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_IDS, NUM_DENSE, HIDDEN, INITIAL = 26, 13, 128, 0.01
ADAM, ROW_WISE, PLAIN = 1e-3, 0.02, 0.05  # learning rates of Adam, row-wise Adagrad and SGD
WARM = 10  # steps before the clock starts
Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]  # ids, numbers, clicks


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Of a contender's process. `--index` and `--number`: which of how many workers it is."""
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 200_000), ("batch", 1024), ("dim", 16), ("largest", 100_000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("index", 0), ("number", 1), ("threads", 1), ("port", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rule", choices=["adam", "row_wise", "sgd"], default="adam")
    parser.add_argument("--mode", choices=["local", "async", "hybrid", "collective"], default="local")
    parser.add_argument("--role", choices=["worker", "server"], default="worker")
    return parser.parse_args(argv)


def sizes(largest: int) -> npt.NDArray[np.int64]:
    """Of the 26 vocabularies, from 4 to `largest`."""
    return np.geomspace(4, largest, NUM_IDS).astype(np.int64)


def generated(num: int, largest: int, seed: int) -> Rows:
    """`num` rows; ids of all slots are numbers of one table."""
    rng = np.random.default_rng(seed)
    own = sizes(largest)
    ranks = np.stack([np.minimum(rng.zipf(1.2, num), size) - 1 for size in own], axis=1)
    ids = ranks + np.concatenate(([0], np.cumsum(own)[:-1]))
    dense = rng.random((num, NUM_DENSE), np.float32)
    signal = _effects(ids).sum(axis=1) * 0.6 + (dense - 0.5) @ np.linspace(-1, 1, NUM_DENSE, dtype=np.float32)
    clicked = rng.random(num) < 1 / (1 + np.exp(-(signal - 1.0)))
    return ids.astype(np.int64), dense, clicked.astype(np.float32)


def _effects(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number of mean 0 for each id, the same in every run."""
    mixed = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return np.asarray(mixed / float(1 << 24) * 2 - 1)


def num_rows(chosen: argparse.Namespace) -> int:
    """Of the table."""
    return int(sizes(chosen.largest).sum())


def share(chosen: argparse.Namespace) -> Rows:
    """This worker's rows: those to warm up with first."""
    total = chosen.rows + WARM * chosen.batch * chosen.number
    found = generated(total, chosen.largest, seed=chosen.seed)
    return tuple(column[chosen.index :: chosen.number] for column in found)  # type: ignore[return-value]


def batches(rows: Rows, size: int) -> Iterator[Rows]:
    for start in range(0, len(rows[0]) - size + 1, size):
        yield tuple(column[start : start + size] for column in rows)  # type: ignore[misc]


def held_out(chosen: argparse.Namespace) -> Rows:
    return generated(max(5_000, chosen.rows // 10), chosen.largest, seed=chosen.seed + 1000)


def timed(train: Callable[[Any], None], warm: Any, own: Any, num_samples: int) -> dict[str, float]:
    """Warm up, then train on `own`: the clock's and the processor's time."""
    train(warm)
    start, cpu = time.perf_counter(), time.process_time()
    train(own)
    return {
        "samples": num_samples,
        "seconds": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
    }


def auc(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """The area under the ROC curve; samples of equal score count half."""
    _, places, counts = np.unique(scores.reshape(-1), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positive = labels.reshape(-1) == 1
    num, rest = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * rest))


def peak_mb(process: str = "self") -> float:
    """The most memory that a process had, by its number, or this one."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def tell(found: dict[str, float]) -> None:
    """The line that the caller reads."""
    print(f"\nRESULT {json.dumps({**found, 'peak_mb': peak_mb()})}", flush=True)
