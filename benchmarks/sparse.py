"""A model that is nearly all embedding, async, with servers and workers as processes, beside local mode.

python -m benchmarks.sparse --json            1 server x 1 worker, 1 x 2, and one process, in turns; about two minutes
python -m benchmarks.sparse --quick --json    smaller and shorter, to see that it works
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import log, report

_WORKER = Path(__file__).with_name("sparse_worker.py")
_SETTINGS = ("batch", "slots", "dim", "num_ids", "num_batches", "zipf", "seconds")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    for name, default in (("batch", 4096), ("slots", 26), ("dim", 16), ("num_ids", 10_000_000), ("num_batches", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.15, help="exponent of the ids' distribution")
    parser.add_argument("--seconds", type=float, default=8.0, help="time of one run, after a first pass over the data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.num_ids, chosen.num_batches, chosen.seconds, chosen.rounds = 100_000, 10, 2.0, 1
    return chosen


def run(chosen: argparse.Namespace, num_workers: int) -> list[dict[str, float]]:
    """What each worker measured; num_workers 0: one process without servers."""
    settings = [word for name in _SETTINGS for word in (f"--{name}", str(getattr(chosen, name)))]
    with tempfile.TemporaryDirectory() as log_dir:
        command = [sys.executable, str(_WORKER), *settings]
        if num_workers:
            roles = ["--server_num", "1", "--worker_num", str(num_workers), "--log_dir", log_dir]
            command = [sys.executable, "-m", "torchfleet.launch", *roles, str(_WORKER), *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        logs = [path.read_text() for path in (Path(log_dir) / "latest").glob("workerlog.*")] or [done.stdout]
    found = [json.loads(line.partition("RESULT ")[2]) for log in logs for line in log.splitlines() if "RESULT " in line]
    if done.returncode or len(found) != max(1, num_workers):
        raise SystemExit(f"the run with {num_workers} workers failed:\n{done.stdout}\n{done.stderr}")
    return found


def main() -> None:
    chosen = options()
    runs: dict[int, list[list[dict[str, float]]]] = {0: [], 1: [], 2: []}
    for turn in range(chosen.rounds):
        for num_workers, found in runs.items():
            found.append(run(chosen, num_workers))
            total = sum(worker["samples_per_s"] for worker in found[-1])
            name = f"1 x {num_workers}" if num_workers else "local"
            log(f"  round {turn + 1}/{chosen.rounds}: {name}: {total:,.0f} samples/s")
    speed = {
        n: statistics.median(sum(w["samples_per_s"] for w in workers) for workers in found) for n, found in runs.items()
    }
    single = {name: statistics.median(found[0][name] for found in runs[1]) for name in runs[1][0][0]}
    result: dict[str, Any] = {
        "samples_per_s": speed[1],
        "samples_per_s_two_workers": speed[2],
        "local_samples_per_s": speed[0],
        "ratio": speed[1] / speed[0],
        "pull_ms": single["pull_wait_ms"],
        "push_ms": single["push_wait_ms"],
        "compute_ms": single["step_ms"] - single["pull_wait_ms"] - single["push_wait_ms"],
        "step_ms": single["step_ms"],
        "unique_ids_per_batch": single["unique"],
        "rounds": chosen.rounds,
        **{name: getattr(chosen, name) for name in _SETTINGS},
    }
    report(result, chosen.json)


if __name__ == "__main__":
    main()
