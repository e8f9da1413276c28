"""Runs of benchmarks.hybrid: one job of processes, and the figures that its workers print."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "benchmarks" / "hybrid_worker.py"
LINK = "20Gbit,30us"  # of simulated machines: about the loopback
PARTS = ("compute", "rows", "slowest", "exchange")  # of a step
Found = list[dict[str, Any]]  # what every worker of a run printed


def run(
    way: str,
    chosen: argparse.Namespace,
    num_workers: int,
    is_slowed: bool = False,
    is_simulated: bool = False,
    seed: int = 0,
) -> Found:
    """`way`: ddp, ranks, servers, balance or quorum. `is_simulated`: in virtual time, not with ddp. Raises SystemExit
    with the output's end if a process fails."""
    # Where all wait for the slow worker, a step takes as many times longer: fewer steps are enough.
    steps = round(chosen.steps / chosen.factor) if is_slowed and way in ("ddp", "servers") else chosen.steps
    flags = ["--way", way, "--batch", str(chosen.batch), "--steps", str(steps)]
    flags += ["--factor", str(chosen.factor), "--by", chosen.by, "--seed", str(seed)]
    flags += ["--slow", str(num_workers - 1)] if is_slowed else []
    with tempfile.TemporaryDirectory() as folder:
        if way == "ddp":
            launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(num_workers)]
        else:
            roles = ["--server_num", str(chosen.servers), "--worker_num", str(num_workers)]
            virtual = ["--simulate", "--link", LINK] if is_simulated else []
            launch = ["torchfleet.launch", *virtual, *roles, "--log_dir", folder]
        command = [sys.executable, "-m", *launch, str(WORKER), *flags]
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        logs = [path.read_text() for path in sorted((Path(folder)).glob("latest/workerlog.*"))]
    found = {each["worker"]: each for each in results("\n".join([done.stdout, *logs]))}
    if done.returncode or len(found) != num_workers:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return [found[worker] for worker in sorted(found)]


def results(text: str) -> list[dict[str, Any]]:
    """What the workers printed behind RESULT. Lines of several ranks may have run together."""
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(text, found.end())[0] for found in re.finditer("RESULT ", text)]


def speed(workers: Found) -> float:
    """Samples/s of all workers together."""
    return sum(int(worker["samples"]) / float(worker["seconds"]) for worker in workers)


def median_speed(runs: Iterable[Found]) -> float:
    return statistics.median(map(speed, runs))


def auc(runs: Iterable[Found]) -> float:
    return statistics.median(float(worker["auc"]) for workers in runs for worker in workers if "auc" in worker)


def trained(runs: Iterable[Found]) -> float:
    """Samples that all workers of a run have trained together, before the clock has started too."""
    return statistics.median(sum(int(worker["trained"]) for worker in workers) for workers in runs)


def step_table(runs: Iterable[Found]) -> dict[str, float]:
    """Milliseconds of a step, the mean over workers and runs: `compute` (with loading and the optimizer's step), `rows`
    (waiting for pulls and the queue), `slowest` (waiting until the slowest worker has given its gradients), `exchange`
    (waiting for means beyond that). They add up to `step`."""
    totals = []
    for worker in (worker for workers in runs for worker in workers):
        spent, num = worker["spent"], worker["steps"]
        if not spent["rounds"]:  # one worker exchanges nothing
            spent = {**spent, "computed": worker["seconds"]}
        parts = {name: 1000 * spent[name] / num for name in ("computed", "waited", "slowest", "rows")}
        rows = min(parts["rows"], parts["computed"])
        own = (parts["computed"] - rows, rows, parts["slowest"], parts["waited"] - parts["slowest"])
        totals.append({**dict(zip(PARTS, own, strict=True)), "step": parts["computed"] + parts["waited"]})
    return {name: statistics.mean(total[name] for total in totals) for name in totals[0]}


def lost_table(alone: dict[str, float], together: dict[str, float]) -> dict[str, float]:
    """By part of a step, the share of n × one worker's speed that is lost to it. With `efficiency` they add up to 1.

    A step of n workers is longer than one worker's by some milliseconds of each part.
    """
    lost = {name: (together[name] - alone[name]) / together["step"] for name in PARTS}
    return {**lost, "efficiency": alone["step"] / together["step"]}


def slow_factor(runs: Iterable[Found]) -> float:
    """How many times longer the last worker computed for a sample than the others: the median of the runs."""
    found: list[float] = []
    for workers in runs:
        costs = [worker["spent"]["computed"] / worker["samples"] for worker in workers]
        found.append(costs[-1] / statistics.median(costs[:-1]))
    return float(statistics.median(found))


def dropped_share(workers: Found) -> float:
    """The share of the samples whose gradients of the network were dropped, with a quorum."""
    samples = workers[0]["quorum"]["samples"]
    return float((samples["dropped"] + samples["waiting"]) / sum(samples.values()))


def rounded(table: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in table.items()}
