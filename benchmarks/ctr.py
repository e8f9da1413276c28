"""CTR-DNN, async, 1 server x 2 workers with one thread each, beside its bare network as two one-thread processes.

python -m benchmarks.ctr --json            in turns; about three minutes
python -m benchmarks.ctr --quick --json    smaller and shorter, to see that it works
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.ctr_data import write_raw
from benchmarks.timing import log, report

ROOT = Path(__file__).parent.parent
_WORKER = Path(__file__).with_name("ctr_worker.py")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15.0, help="time of one run, after a first pass over the data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.seconds, chosen.rounds = 20_000, 2.0, 1
    return chosen


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_training(chosen: argparse.Namespace, files: list[str], test: list[str]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as log_dir:
        roles = ["--server_num", "1", "--worker_num", "2", "--log_dir", log_dir]
        what = ["train", "--batch", str(chosen.batch), "--seconds", str(chosen.seconds)]
        command = [
            sys.executable,
            "-m",
            "torchfleet.launch",
            *roles,
            str(_WORKER),
            *what,
            "--files",
            *files,
            "--test",
            *test,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment())
        logs = [path.read_text() for path in (Path(log_dir) / "latest").glob("workerlog.*")]
    found = results("\n".join(logs))
    if done.returncode or len(found) != 2:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return found


def run_towers(chosen: argparse.Namespace) -> list[dict[str, float]]:
    command = [sys.executable, str(_WORKER), "tower", "--batch", str(chosen.batch), "--seconds", str(chosen.seconds)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) for _ in range(2)]
    return results("\n".join(process.communicate(timeout=600)[0] for process in both))


def results(text: str) -> list[dict[str, float]]:
    return [json.loads(line.partition("RESULT ")[2]) for line in text.splitlines() if "RESULT " in line]


def main() -> None:
    chosen = options()
    trained: list[list[dict[str, float]]] = []
    towers: list[list[dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        log(f"writing {chosen.rows:,} rows")
        *files, test = write_raw(Path(folder), chosen.rows, 8)
        for turn in range(chosen.rounds):
            towers.append(run_towers(chosen))
            trained.append(run_training(chosen, files, [test]))
            bare, rate = (
                sum(worker[name] for worker in both[-1])
                for both, name in ((towers, "bare"), (trained, "samples_per_s"))
            )
            log(f"  round {turn + 1}/{chosen.rounds}: tower {bare:,.0f}, training {rate:,.0f} samples/s")
    rate = statistics.median(sum(worker["samples_per_s"] for worker in both) for both in trained)
    tower = statistics.median(sum(worker["bare"] for worker in both) for both in towers)
    whole = statistics.median(sum(worker["input"] for worker in both) for both in towers)
    workers = [worker for both in trained for worker in both]
    middle = {
        name: statistics.median(worker[name] for worker in workers) for name in workers[0] if name != "samples_per_s"
    }
    report(
        {
            "samples_per_s": rate,
            "tower_samples_per_s": tower,
            "ratio": rate / tower,
            "tower_with_input_gradient_samples_per_s": whole,
            "ratio_to_tower_with_input_gradient": rate / whole,
            **middle,
            "rows": chosen.rows,
            "batch": chosen.batch,
            "rounds": chosen.rounds,
            "seconds": chosen.seconds,
        },
        chosen.json,
    )


if __name__ == "__main__":
    main()
