"""AUC of CTR-DNN in hybrid and sync mode with some numbers of workers at the same global batch, over seeds."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.scale_runs import Outcome, Setting, prepared, run
from benchmarks.timing import log

MODES = ("hybrid", "sync")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("AUC").add_argument
    add("--auc_workers", nargs="+", type=int, default=[8, 12, 32])
    add("--auc_real_up_to", type=int, default=12, help="largest number of workers as real processes; more: simulated")
    add("--auc_batch", type=int, default=1920, help="samples of a step of all workers together")
    add("--auc_rows", type=int, default=200_000, help="rows to make up (a tenth of them for testing)")
    add("--auc_epochs", type=int, default=3)
    add("--seeds", type=int, default=3)
    add("--auc_jobs", type=int, default=1, help="real runs at a time")
    add("--jobs", type=int, default=1, help="simulations at a time, beside real runs; each takes one core")


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """By mode and number of workers: the mean test AUC after the last epoch, of each seed, and samples/s."""
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(Path(folder) / "rows", chosen.auc_rows)
        wanted = settings(chosen, data)
        real = [setting for setting in wanted if not setting.simulated]
        with ThreadPoolExecutor(chosen.auc_jobs) as real_ones, ThreadPoolExecutor(chosen.jobs) as others:
            under_way = [(each, (others if each.simulated else real_ones).submit(logged, each)) for each in wanted]
            found = [(setting, run.result()) for setting, run in under_way]
    log(f"  {len(real)} real runs, {len(wanted) - len(real)} simulated ones")
    return table(found)


def settings(chosen: argparse.Namespace, data: str) -> list[Setting]:
    """All runs, seed by seed. Every worker's batch is its share of the global one."""
    return [
        Setting(
            data,
            mode,
            workers,
            seed,
            chosen.servers,
            chosen.auc_batch // workers,
            chosen.auc_epochs,
            workers > chosen.auc_real_up_to,
        )
        for seed in range(chosen.seeds)
        for workers in chosen.auc_workers
        for mode in MODES
    ]


def logged(setting: Setting) -> Outcome:
    outcome = run(setting)
    log(f"  {setting.name}: AUC {outcome.auc[-1]:.4f}, {outcome.samples_per_s:,.0f} samples/s")
    return outcome


def table(found: Iterable[tuple[Setting, Outcome]]) -> dict[str, Any]:
    by_name: dict[str, list[Outcome]] = {}
    for setting, outcome in found:
        name = f"{setting.mode}_{setting.workers}{'_simulated' if setting.simulated else ''}"
        by_name.setdefault(name, []).append(outcome)
    return {
        name: {
            "mean": round(statistics.mean(outcome.auc[-1] for outcome in outcomes), 4),
            "seeds": [round(outcome.auc[-1], 4) for outcome in outcomes],
            "samples_per_s": statistics.median(outcome.samples_per_s for outcome in outcomes),
        }
        for name, outcomes in by_name.items()
    }
