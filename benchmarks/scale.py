"""How AUC and speed of CTR-DNN change with the number of workers, in every mode: real processes and simulated ones.

python -m benchmarks.scale --json                              generated rows; real while cores last, then simulated
python -m benchmarks.scale --criteo kaggle.txt.xz --json       the same on real Criteo rows
python -m benchmarks.scale --plot scale.png --out runs.jsonl   a picture, and every run as a line of JSON
python -m benchmarks.scale --quick --json                      few rows, 1 and 2 workers: to see that it works

A worker's batch (`--batch`) stays the same, so that the batch of a sync or hybrid step grows with the workers. The keys
of the result are explained in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.scale_plot import plot
from benchmarks.scale_runs import MODES, ROOT, Outcome, Setting, prepared, run, run_beside_copies
from benchmarks.timing import log, report

Runs = dict[Setting, Outcome]
WORKERS = [1, 2, 4, 8, 16, 32]
LARGEST = 8  # the number of workers that the result's keys are about


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000, help="rows to make up (a tenth of them for testing)")
    parser.add_argument("--criteo", help="a file of raw Criteo rows to train on instead")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1000, help="samples of one worker in one step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--real_up_to", type=int, help="largest number of workers as real processes (default: one core per process)"
    )
    parser.add_argument("--both", action="store_true", help="simulate also what is run for real, and compare")
    parser.add_argument("--link", default="", help="of a simulation, as fleetrun --link (default: as on one machine)")
    parser.add_argument("--jitter", type=float, default=0.0, help="of a simulation, as fleetrun --jitter")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time; each takes one core")
    parser.add_argument(
        "--as_full", action="store_true", help="simulate beside copies, so that as many cores compute as in a real run"
    )
    parser.add_argument("--no_load", action="store_true", help="leave out one server under eight workers")
    parser.add_argument("--out", help="append every run to this file, one JSON object a line")
    parser.add_argument("--plot", help="a PNG of AUC and speed over the number of workers")
    parser.add_argument("--quick", action="store_true", help="4,000 rows, one epoch, one seed, 1 and 2 workers")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if min(chosen.seeds, chosen.epochs, chosen.batch, chosen.jobs, *chosen.workers) < 1 or chosen.rows < 4000:
        parser.error("--seeds, --epochs, --batch, --jobs and --workers must be at least 1, --rows at least 4000")
    if chosen.as_full and chosen.jobs > 1:
        parser.error(f"--as_full runs copies of one simulation at a time: leave out --jobs {chosen.jobs}")
    if chosen.real_up_to is None:
        chosen.real_up_to = max(1, len(os.sched_getaffinity(0)) - chosen.servers)
    if chosen.quick:
        chosen.rows, chosen.epochs, chosen.seeds, chosen.batch = 4000, 1, 1, 100
        chosen.workers, chosen.servers, chosen.real_up_to, chosen.both, chosen.no_load = [1, 2], 1, 2, True, True
    return chosen


def settings(chosen: argparse.Namespace, data: str) -> list[Setting]:
    """All runs. Real ones are in turns: every mode once, then every mode again."""
    found = []
    for seed in range(chosen.seeds):
        for workers in chosen.workers:
            for mode in chosen.modes:
                is_real = workers <= chosen.real_up_to
                for simulated in ([False, True] if chosen.both else [False]) if is_real else [True]:
                    shape = (chosen.servers, chosen.batch, chosen.epochs)
                    found.append(Setting(data, mode, workers, seed, *shape, simulated, chosen.link, chosen.jitter))
    return found


def run_all(wanted: Iterable[Setting], jobs: int, out: str | None, as_full: bool = False) -> Runs:
    """Real runs one after another on the whole machine; simulated ones `jobs` at a time. `as_full`: one after another,
    each as `run_beside_copies`."""
    wanted = list(wanted)
    found: Runs = {}

    def keep(setting: Setting, outcome: Outcome) -> None:
        found[setting] = outcome
        log(f"{len(found)}/{len(wanted)} {setting.name}: AUC {outcome.auc[-1]:.4f}, {outcome.samples_per_s:,.0f}/s")
        if out:
            with Path(out).open("a") as lines:
                lines.write(json.dumps({**vars_of(setting), "auc": outcome.auc, "speed": outcome.samples_per_s}) + "\n")

    for setting in (setting for setting in wanted if not setting.simulated):
        keep(setting, run(setting))
    simulate = run_beside_copies if as_full else run
    with ThreadPoolExecutor(1 if as_full else jobs) as pool:
        under_way = {pool.submit(simulate, setting): setting for setting in wanted if setting.simulated}
        for done in as_completed(under_way):
            keep(under_way[done], done.result())
    return found


def vars_of(setting: Setting) -> dict[str, Any]:
    names = ("mode", "workers", "seed", "servers", "batch", "epochs", "simulated", "link", "jitter")
    return {name: getattr(setting, name) for name in names}


def means(runs: Runs) -> dict[tuple[str, int, bool], tuple[float, float]]:
    """By mode, workers and whether simulated: mean AUC, and median speed, of the seeds."""
    found: dict[tuple[str, int, bool], list[Outcome]] = {}
    for setting, outcome in runs.items():
        found.setdefault((setting.mode, setting.workers, setting.simulated), []).append(outcome)
    return {
        key: (statistics.mean(o.auc[-1] for o in all_seeds), statistics.median(o.samples_per_s for o in all_seeds))
        for key, all_seeds in found.items()
    }


def result_of(found: Mapping[tuple[str, int, bool], tuple[float, float]]) -> dict[str, Any]:
    """The keys of the result; real runs where there are some. A key whose runs were not asked for is missing."""
    best = {(mode, workers): found.get((mode, workers, False), values) for (mode, workers, _), values in found.items()}
    result: dict[str, Any] = {
        f"auc_{mode}_{LARGEST}": best[mode, LARGEST][0] for mode in MODES if (mode, LARGEST) in best
    }
    if ("hybrid", 1) in best and ("hybrid", LARGEST) in best:
        result[f"hybrid_efficiency_{LARGEST}"] = best["hybrid", LARGEST][1] / (LARGEST * best["hybrid", 1][1])
    both = [(mode, workers) for mode, workers, simulated in found if simulated and (mode, workers, False) in found]
    if both:
        errors = {(mode, n): found[mode, n, True][1] / found[mode, n, False][1] - 1 for mode, n in both}
        apart = {(mode, n): found[mode, n, True][0] - found[mode, n, False][0] for mode, n in both}
        result["simulator_error"] = max(abs(error) for error in errors.values())
        result["simulator_errors"] = {f"{mode}_{workers}": error for (mode, workers), error in errors.items()}
        result["simulator_auc_apart"] = {f"{mode}_{workers}": by for (mode, workers), by in apart.items()}
    result["runs"] = {
        f"{mode}_{workers}{'_simulated' if simulated else ''}": {"auc": auc, "samples_per_s": speed}
        for (mode, workers, simulated), (auc, speed) in found.items()
    }
    return result


def server_load() -> dict[str, Any]:
    """One server under 1, 2, 4 and 8 workers: its speed under 8 to its best under fewer."""
    flags = ["--grid", "1x1,1x2,1x4,1x8", "--rounds", "2", "--seconds", "4", "--json"]
    command = [sys.executable, "-m", "benchmarks.sparse", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True, timeout=1200)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"server_load_ratio": found["server_load_ratio"]}


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory() as folder:
        log("writing rows")
        data = prepared(Path(folder) / "rows", chosen.rows, chosen.criteo)
        found = means(run_all(settings(chosen, data), chosen.jobs, chosen.out, chosen.as_full))
    result = result_of(found)
    if not chosen.no_load:
        result |= server_load()
    if chosen.plot:
        plot(found, chosen.plot)
    asked = {
        name: getattr(chosen, name)
        for name in ("rows", "criteo", "servers", "batch", "epochs", "seeds", "link", "jitter", "as_full")
    }
    report({**result, **asked}, chosen.json)


if __name__ == "__main__":
    main()
