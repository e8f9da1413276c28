"""CTR-DNN, async, its workers with one thread each: what a step costs beside the network that it trains.

python -m benchmarks.ctr --json               1 server x 1 worker; under a minute
python -m benchmarks.ctr --workers 2 --json   all on the cores that there are
python -m benchmarks.ctr --quick --json       smaller and shorter, to see that it works

Every worker trains in blocks of steps, in turns with blocks of its network alone, on rows of the same data: forward and
backward to the gradient of its input (`network_ms`), or without that (`bare_network_ms`). Times are medians of a step.
`network_ratio` is network_ms / step_ms, `network_cpu_ratio` the same of the training thread's processor time, which
does not depend on what else the machine does. A third kind of block tells where the rest goes: `own_*_ms` in the
training thread (`own_*_cpu_ms`: its processor time), `beside_*_ms` in other threads; a part does not contain others.
`cpu_training_ms`, `cpu_threads_ms` and `cpu_rest_ms`: processor time per step of the training thread, of Python's other
threads (sender, reader), and of ZeroMQ's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.ctr_data import write_raw
from benchmarks.rank_jobs import results
from benchmarks.timing import log, report

ROOT = Path(__file__).parent.parent
_WORKER = Path(__file__).with_name("ctr_worker.py")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="time of the run, after a first pass over the data")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.seconds = 20_000, 2.0
    return chosen


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run_training(chosen: argparse.Namespace, files: list[str], test: list[str]) -> list[dict[str, float]]:
    """What each worker found."""
    with tempfile.TemporaryDirectory() as log_dir:
        roles = ["--server_num", str(chosen.servers), "--worker_num", str(chosen.workers), "--log_dir", log_dir]
        what = ["--batch", str(chosen.batch), "--seconds", str(chosen.seconds), "--files", *files, "--test", *test]
        command = [sys.executable, "-m", "torchfleet.launch", *roles, str(_WORKER), *what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment())
        logs = [path.read_text() for path in (Path(log_dir) / "latest").glob("workerlog.*")]
    found = results("\n".join(logs))
    if done.returncode or len(found) != chosen.workers:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return found


def summary(workers: list[dict[str, float]]) -> dict[str, float]:
    """Medians over workers; their rates together."""
    names = dict.fromkeys(name for worker in workers for name in worker)
    middle = {name: statistics.median(worker.get(name, 0.0) for worker in workers) for name in names}
    return {**middle, "samples_per_s": sum(worker["samples_per_s"] for worker in workers)}


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory() as folder:
        log(f"writing {chosen.rows:,} rows")
        *files, test = write_raw(Path(folder), chosen.rows, 9)
        log(f"{chosen.servers} servers, {chosen.workers} workers, {chosen.seconds:g} s")
        workers = run_training(chosen, files, [test])
    settings: dict[str, Any] = {name: getattr(chosen, name) for name in ("rows", "batch", "seconds")}
    report({**summary(workers), **settings, "servers": chosen.servers, "workers": chosen.workers}, chosen.json)


if __name__ == "__main__":
    main()
