"""deepctr-torch's DeepFM: a server and two workers on the cores that there are, beside one process of plain torch.

python -m benchmarks.deepfm --json            one server x two workers, async and hybrid, and plain torch; some minutes
python -m benchmarks.deepfm --quick --json    smaller and shorter, to see that it works

The rival is torch at its best: one thread and all cores, tables with dense and with sparse gradients are tried first,
and the fastest takes part. All of them train on the same rows once, with batches of the same size and Adagrad. `ratio`
is that of samples per second, async over plain; `*_cpu_ms` is the processor time of a worker's step, which does not
depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rank_jobs import results
from benchmarks.timing import log, report

ROOT = Path(__file__).parent.parent
_WORKER = Path(__file__).with_name("deepfm_worker.py")
_SETTINGS = ("rows", "batch", "dim", "largest", "seed")
_FLEETS = ("async", "hybrid")

Found = list[dict[str, float]]  # what each process measured


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deepfm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, text in (
        ("rows", 200_000, "rows to train on"),
        ("batch", 1024, "samples of a step, of every worker"),
        ("dim", 8, "of embeddings"),
        ("largest", 100_000, "ids of the largest of 26 tables; the smallest has 4"),
        ("workers", 2, "of the fleet"),
        ("rounds", 5, "of all contenders in turns"),
        ("seed", 0, "of first values and of the order of rows"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.largest, chosen.rounds = 10_000, 2_000, 1
    return chosen


def rivals(num_cores: int) -> dict[str, list[str]]:
    """Settings of plain torch, by name."""
    threads = sorted({1, num_cores})
    return {
        f"{kind}, {num} threads": ["--plain", kind, "--threads", str(num)]
        for kind in ("dense", "sparse")
        for num in threads
    }


def run(chosen: argparse.Namespace, contender: list[str], num_workers: int = 0) -> Found:
    """One contender's run: as one process, or with a server and `num_workers` workers."""
    words = [*contender, *(word for name in _SETTINGS for word in (f"--{name}", str(getattr(chosen, name))))]
    threads = {"OMP_NUM_THREADS": "1"} if num_workers else {}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as log_dir:
        command = [sys.executable, str(_WORKER), *words]
        if num_workers:
            roles = ["--server_num", "1", "--worker_num", str(num_workers), "--log_dir", log_dir]
            command = [sys.executable, "-m", "torchfleet.launch", *roles, str(_WORKER), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
        logs = [path.read_text() for path in sorted((Path(log_dir) / "latest").glob("workerlog.*"))] or [done.stdout]
    found = results("\n".join(logs))
    if done.returncode or len(found) != max(1, num_workers):
        raise SystemExit(f"the run of {' '.join(words)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return found


def speed(found: Found) -> float:
    """Samples per second of all workers together, until the last of them is done."""
    return sum(worker["samples"] for worker in found) / max(worker["seconds"] for worker in found)


def summary(rounds: Mapping[str, list[Found]]) -> dict[str, Any]:
    """Medians over the rounds of "plain", "async" and "hybrid"."""
    middle = {name: statistics.median(map(speed, runs)) for name, runs in rounds.items()}
    step = {name: _median(runs, "cpu_ms") for name, runs in rounds.items()}
    auc = {name: statistics.median(found[0]["auc"] for found in runs) for name, runs in rounds.items()}
    return {
        "plain_samples_per_s": middle["plain"],
        "fleet_samples_per_s": middle["async"],
        "hybrid_samples_per_s": middle["hybrid"],
        "ratio": middle["async"] / middle["plain"],
        "hybrid_ratio": middle["hybrid"] / middle["plain"],
        "auc_plain": auc["plain"],
        "auc_fleet": auc["async"],
        "auc_hybrid": auc["hybrid"],
        "plain_cpu_ms": step["plain"],
        "fleet_cpu_ms": step["async"],
        "fleet_training_thread_cpu_ms": _median(rounds["async"], "training_thread_cpu_ms"),
        "hybrid_cpu_ms": step["hybrid"],
        "unforeseen_share": _median(rounds["async"], "unforeseen_lookups") / _median(rounds["async"], "lookups"),
    }


def _median(runs: list[Found], name: str) -> float:
    return statistics.median(worker[name] for found in runs for worker in found)


def main() -> None:
    chosen = options()
    known = rivals(os.cpu_count() or 1)
    tried = {name: speed(run(chosen, contender)) for name, contender in known.items()}
    best = max(tried, key=lambda name: tried[name])
    log("plain torch: " + ", ".join(f"{name} {value:,.0f} samples/s" for name, value in tried.items()))
    contenders = {"plain": (known[best], 0), **{mode: (["--mode", mode], chosen.workers) for mode in _FLEETS}}
    rounds: dict[str, list[Found]] = {name: [] for name in contenders}
    for turn in range(chosen.rounds):
        for name, (contender, num_workers) in contenders.items():
            rounds[name].append(run(chosen, contender, num_workers))
        speeds = ", ".join(f"{name} {speed(runs[-1]):,.0f}" for name, runs in rounds.items())
        log(f"  round {turn + 1}/{chosen.rounds}: {speeds}")
    settings = {name: getattr(chosen, name) for name in (*_SETTINGS, "workers", "rounds")}
    report({**summary(rounds), "rival": best, **settings}, chosen.json)


if __name__ == "__main__":
    main()
