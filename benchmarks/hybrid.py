"""Hybrid mode's exchange of the network, through the servers and among ranks, beside plain DistributedDataParallel.

python -m benchmarks.hybrid --json                       8 workers: speeds, a table of a step, one worker slowed
python -m benchmarks.hybrid --quick --json               2 workers, few steps, to see that it works

servers_ratio, ranks_ratio   samples/s with rows over those of DistributedDataParallel on the same network without rows
straggler_ratio              one worker slowed five times, with balance, over the sum of the workers' speeds
step_ms                      where a step of `servers` goes; the parts add up to the whole
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import log, report

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "benchmarks" / "hybrid_worker.py"
Found = list[dict[str, Any]]  # what every worker of a run printed


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hybrid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1000, help="samples of one worker in one step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=5.0, help="how many times slower the slow worker is")
    parser.add_argument("--by", choices=["busy", "sleep"], default="busy", help="how it is slowed")
    parser.add_argument("--straggler_rounds", type=int, default=1, help="0: without a slow worker")
    parser.add_argument("--quick", action="store_true", help="2 workers, 5 steps, one round")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.workers, chosen.steps, chosen.rounds, chosen.batch = 2, 5, 1, 100
    return chosen


def main() -> None:
    chosen = options()
    found: dict[str, list[Found]] = {"ddp": [], "servers": [], "ranks": []}
    for turn in range(chosen.rounds):
        for way, runs in found.items():
            runs.append(run(way, chosen))
        speeds = ", ".join(f"{way} {speed(runs[-1]):,.0f}" for way, runs in found.items())
        log(f"  round {turn + 1}/{chosen.rounds}, samples/s: {speeds}")
    slowed: dict[str, list[Found]] = {"ddp": [], "servers": [], "balance": []}
    for turn in range(chosen.straggler_rounds):
        for way, runs in slowed.items():
            runs.append(run(way, chosen, is_slowed=True))
        speeds = ", ".join(f"{way} {speed(runs[-1]):,.0f}" for way, runs in slowed.items())
        log(f"  one slowed, round {turn + 1}/{chosen.straggler_rounds}, samples/s: {speeds}")
    report({**summary(found, slowed, chosen.factor), **settings(chosen)}, chosen.json)


def summary(found: dict[str, list[Found]], slowed: dict[str, list[Found]], factor: float) -> dict[str, Any]:
    speeds = {way: statistics.median(map(speed, runs)) for way, runs in found.items()}
    result: dict[str, Any] = {f"{way}_samples_per_s": value for way, value in speeds.items()}
    result |= {f"{way}_ratio": speeds[way] / speeds["ddp"] for way in ("servers", "ranks")}
    result |= {f"{way}_auc": auc(found[way]) for way in ("servers", "ranks")}
    result["step_ms"] = step_table(found["servers"])
    if slowed["balance"]:
        num = found["servers"][0][0]["workers"]
        after = {way: statistics.median(map(speed, runs)) for way, runs in slowed.items()}
        possible = speeds["servers"] * (num - 1 + 1 / factor) / num
        result["straggler_ratio"] = after["balance"] / possible
        result["straggler_ratio_unbalanced"] = after["servers"] / possible
        result["straggler_ratio_ddp"] = after["ddp"] / (speeds["ddp"] * (num - 1 + 1 / factor) / num)
        result |= {"straggler_auc": auc(slowed["balance"]), "straggler_auc_unbalanced": auc(slowed["servers"])}
    return result


def speed(workers: Found) -> float:
    """Samples/s of all workers together, until the last of them is done."""
    seconds = max(float(worker["seconds"]) for worker in workers)
    return sum(int(worker["samples"]) for worker in workers) / seconds


def auc(runs: list[Found]) -> float:
    return statistics.median(float(worker["auc"]) for workers in runs for worker in workers if "auc" in worker)


def step_table(runs: list[Found]) -> dict[str, float]:
    """Milliseconds of a step, the mean over workers and runs: `compute` (with loading and the optimizer's step), `rows`
    (waiting for pulls and the queue), `slowest` (waiting until the slowest worker has given its gradients), `exchange`
    (waiting for means beyond that)."""
    totals = []
    for workers in runs:
        for worker in workers:
            own = worker["exchange"]
            parts = {name: 1000 * own[name] / own["rounds"] for name in ("computed", "waited", "slowest")}
            rows = min(worker["rows_ms"], parts["computed"])
            totals.append(
                {
                    "compute": parts["computed"] - rows,
                    "rows": rows,
                    "slowest": parts["slowest"],
                    "exchange": parts["waited"] - parts["slowest"],
                    "step": parts["computed"] + parts["waited"],
                }
            )
    return {name: round(statistics.mean(total[name] for total in totals), 3) for name in totals[0]}


def run(way: str, chosen: argparse.Namespace, is_slowed: bool = False) -> Found:
    """Raises SystemExit with the end of the output if a process fails."""
    flags = ["--way", "servers" if way == "balance" else way, "--batch", str(chosen.batch)]
    flags += ["--steps", str(chosen.steps), "--factor", str(chosen.factor), "--by", chosen.by]
    flags += ["--balance"] if way == "balance" else []
    flags += ["--slow", str(chosen.workers - 1)] if is_slowed else []
    with tempfile.TemporaryDirectory() as folder:
        if way == "ddp":
            launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(chosen.workers)]
        else:
            roles = ["--server_num", str(chosen.servers), "--worker_num", str(chosen.workers)]
            launch = ["torchfleet.launch", *roles, "--log_dir", folder]
        command = [sys.executable, "-m", *launch, str(WORKER), *flags]
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        logs = [path.read_text() for path in sorted((Path(folder)).glob("latest/workerlog.*"))]
    found = {each["worker"]: each for each in results("\n".join([done.stdout, *logs]))}
    if done.returncode or len(found) != chosen.workers:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return [found[worker] for worker in sorted(found)]


def results(text: str) -> list[dict[str, Any]]:
    """What the workers printed behind RESULT. Lines of several ranks may have run together."""
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(text, found.end())[0] for found in re.finditer("RESULT ", text)]


def settings(chosen: argparse.Namespace) -> dict[str, Any]:
    names = ("workers", "servers", "batch", "steps", "rounds", "factor", "by")
    return {name: getattr(chosen, name) for name in names}


if __name__ == "__main__":
    main()
