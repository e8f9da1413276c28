"""A model that is nearly all embedding, async, with servers and workers as processes, beside local mode.

python -m benchmarks.sparse --json            1 server x 1 worker, 1 x 2, and one process, in turns; about two minutes
python -m benchmarks.sparse --quick --json    smaller and shorter, to see that it works
python -m benchmarks.sparse --grid 1x1,1x2,1x4,1x8,2x8,4x8 --json    servers x workers: a server under load
python -m benchmarks.sparse --grid 2x4,2x4+replicas,2x4+log --json   what backups cost, or a log of every change
python -m benchmarks.sparse --grid 1x1,4x8 --optimizer rowwise_adagrad --json   the rule of FBGEMM and TorchRec

With --grid the data is the same for every layout: `--num_batches` batches are dealt out to the workers, as the data of
a job is. Each worker then has one thread, unless OMP_NUM_THREADS is set.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rank_jobs import results
from benchmarks.timing import log, report

_WORKER = Path(__file__).with_name("sparse_worker.py")
_SETTINGS = ("batch", "slots", "dim", "num_ids", "num_batches", "zipf", "seconds", "optimizer")
_MANY = 8  # workers of the layout that is held against those with fewer

_REPLICAS, _LOG = ("--replicas", "2"), ("--durability", "log", "--max_restart", "1")
_ENDURANCE = {"": (), "replicas": _REPLICAS, "log": _LOG, "both": (*_REPLICAS, *_LOG)}
_LAYOUT = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)(?:\+(replicas|log|both))?")


class Layout(NamedTuple):
    """What takes part in a run; no servers: one process."""

    servers: int
    workers: int
    endurance: str = ""  # how servers outlive their death: a key of _ENDURANCE

    @property
    def name(self) -> str:
        counts = f"{self.servers}x{self.workers}" if self.servers else "local"
        return f"{counts}+{self.endurance}" if self.endurance else counts


Found = list[dict[str, Any]]  # what each worker measured


def layouts(text: str) -> list[Layout]:
    """1x2,2x8+log as [Layout(1, 2), Layout(2, 8, "log")]."""
    matches = [_LAYOUT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise argparse.ArgumentTypeError(
            f"expected servers x workers, such as 1x1,1x2,2x8, or 2x8+replicas, 2x8+log, 2x8+both; found {text!r}"
        )
    return [Layout(int(match[1]), int(match[2]), match[3] or "") for match in matches if match]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("batch", 4096), ("slots", 26), ("dim", 16), ("num_ids", 10_000_000), ("num_batches", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.15, help="exponent of the ids' distribution")
    parser.add_argument("--seconds", type=float, default=8.0, help="time of one run, after a first pass over the data")
    parser.add_argument("--optimizer", choices=("adam", "rowwise_adagrad"), default="adam", help="rule of the rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--grid", type=layouts, help="servers x workers of every run, such as 1x1,1x8,4x8")
    parser.add_argument(
        "--private", choices=["keys", "ipc", "plain"], help="how the job keeps others out (default: fleetrun's own)"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.num_ids, chosen.num_batches, chosen.seconds, chosen.rounds = 100_000, 10, 2.0, 1
    return chosen


def run(chosen: argparse.Namespace, layout: Layout) -> Found:
    settings = [word for name in _SETTINGS for word in (f"--{name}", str(getattr(chosen, name)))]
    with tempfile.TemporaryDirectory() as log_dir:
        command = [sys.executable, str(_WORKER), *settings]
        if layout.servers:
            roles = ["--server_num", str(layout.servers), "--worker_num", str(layout.workers), "--log_dir", log_dir]
            way = {None: [], "plain": ["--plain"]}.get(chosen.private, ["--private", str(chosen.private)])
            endurance = _ENDURANCE[layout.endurance]
            command = [sys.executable, "-m", "torchfleet.launch", *roles, *way, *endurance, str(_WORKER), *settings]
        threads = {"OMP_NUM_THREADS": "1"} if chosen.grid else {}  # more than cores, and they would take the servers'
        environment = {**threads, **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        logs = [path.read_text() for path in (Path(log_dir) / "latest").glob("workerlog.*")] or [done.stdout]
    found = results("\n".join(logs))
    if done.returncode or len(found) != layout.workers:
        raise SystemExit(f"the run of {layout.name} failed:\n{done.stdout}\n{done.stderr}")
    return found


def speed(found: Found) -> float:
    """Samples per second of all workers together."""
    return float(sum(worker["samples_per_s"] for worker in found))


def summary(rounds: list[Found]) -> dict[str, Any]:
    """Medians over rounds: speed, and of the mean worker its waits, its loss and the servers' busy share."""
    means: dict[str, float] = {
        name: statistics.median(statistics.fmean(worker[name] for worker in found) for found in rounds)
        for name in ("pull_wait_ms", "push_wait_ms", "dense_wait_ms", "step_ms", "loss", "servers_busy")
        if name in rounds[0][0]
    }
    return {"samples_per_s": statistics.median(map(speed, rounds)), **means}


def load_ratio(speeds: dict[Layout, float]) -> float | None:
    """The speed of one server with many workers over the best with fewer; None if the grid has not both."""
    fewer = [
        speed
        for layout, speed in speeds.items()
        if layout.servers == 1 and layout.workers < _MANY and not layout.endurance
    ]
    many = speeds.get(Layout(1, _MANY))
    return many / max(fewer) if many is not None and fewer else None


def endurance_ratios(speeds: dict[Layout, float]) -> dict[str, float]:
    """The speed of every run with backups or a log over that of the same layout without."""
    plain = {layout: layout._replace(endurance="") for layout in speeds if layout.endurance}
    return {layout.name: speeds[layout] / speeds[bare] for layout, bare in plain.items() if bare in speeds}


def two_workers(runs: dict[Layout, list[Found]]) -> dict[str, Any]:
    """The figures of a run without `--grid`."""
    speeds = {layout: statistics.median(map(speed, rounds)) for layout, rounds in runs.items()}
    single = summary(runs[Layout(1, 1)])
    return {
        "samples_per_s": speeds[Layout(1, 1)],
        "samples_per_s_two_workers": speeds[Layout(1, 2)],
        "local_samples_per_s": speeds[Layout(0, 1)],
        "ratio": speeds[Layout(1, 1)] / speeds[Layout(0, 1)],
        "pull_ms": single["pull_wait_ms"],
        "push_ms": single["push_wait_ms"],
        "compute_ms": single["step_ms"] - single["pull_wait_ms"] - single["push_wait_ms"],
        "step_ms": single["step_ms"],
        "loss": single["loss"],
        "servers_busy": single.get("servers_busy"),
    }


def main() -> None:
    chosen = options()
    runs: dict[Layout, list[Found]] = {
        layout: [] for layout in chosen.grid or [Layout(0, 1), Layout(1, 1), Layout(1, 2)]
    }
    for turn in range(chosen.rounds):
        for layout, rounds in runs.items():
            rounds.append(run(chosen, layout))
            log(f"  round {turn + 1}/{chosen.rounds}: {layout.name}: {speed(rounds[-1]):,.0f} samples/s")
    if chosen.grid:
        grid = {layout.name: summary(rounds) for layout, rounds in runs.items()}
        speeds = {layout: grid[layout.name]["samples_per_s"] for layout in runs}
        result: dict[str, Any] = {"grid": grid, "server_load_ratio": load_ratio(speeds)}
        result["endurance_ratios"] = endurance_ratios(speeds)
    else:
        result = two_workers(runs)
    result["unique_ids_per_batch"] = next(iter(runs.values()))[0][0]["unique"]
    report({**result, "rounds": chosen.rounds, **{name: getattr(chosen, name) for name in _SETTINGS}}, chosen.json)


if __name__ == "__main__":
    main()
